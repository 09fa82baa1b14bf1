#pragma once

#include <cstddef>
#include <iterator>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "gpipe/snapshot/pickle_input.h"
#include "gpipe/snapshot/plain.h"
#include "gpipe/snapshot/stored_tensors.h"

namespace gpipe::pickle {

/// A class or function that the pickle refers to, such as "collections.OrderedDict".
struct Global {
  std::string name;
};
/// The hooks of a tensor: an empty OrderedDict.
struct Hooks {};
struct Item;
/// A tuple with items that are not plain values: the arguments of a storage or a tensor.
struct Arguments {
  std::vector<Item> items;
};

/// An item on the stack of a pickle.
struct Item {
  std::variant<Plain, Global, Stored, Hooks, Arguments> what;
  int depth = 0;  ///< levels of nested lists, dicts and tuples

  /// Returns the plain value if it is a Value, else null.
  template <class Value>
  const Value* plain() const {
    const auto* value = std::get_if<Plain>(&what);
    return value == nullptr ? nullptr : std::get_if<Value>(&value->value);
  }
};

/// The stack of a pickle, with marks. Items below the last mark cannot be accessed. Errors: std::runtime_error for a
/// malformed pickle.
class Stack {
 public:
  bool empty() const { return items_.empty(); }
  bool has_marks() const { return !marks_.empty(); }

  template <class What>
  void push(What what, int depth = 0) {
    items_.push_back({std::move(what), depth});
  }
  void push(Item item) { items_.push_back(std::move(item)); }
  void mark() { marks_.push_back(items_.size()); }

  std::vector<Item> pop(std::size_t count) {
    if (items_.size() - bottom() < count) malformed();
    const auto first = items_.end() - static_cast<std::ptrdiff_t>(count);
    std::vector<Item> items(std::make_move_iterator(first), std::make_move_iterator(items_.end()));
    items_.erase(first, items_.end());
    return items;
  }
  Item pop() { return std::move(pop(1).front()); }
  /// Pops the items above the last mark, and the mark.
  std::vector<Item> pop_to_mark() {
    if (marks_.empty()) malformed();
    auto items = pop(items_.size() - marks_.back());
    marks_.pop_back();
    return items;
  }

  Item& top() {
    if (items_.size() == bottom()) malformed();
    return items_.back();
  }
  /// Returns the list or dict on top. Container is Plain::List or Plain::Dict.
  template <class Container>
  Container& top_container() {
    if (std::holds_alternative<Hooks>(top().what)) refuse("contains an OrderedDict; convert it to a dict first");
    auto* value = std::get_if<Plain>(&top().what);
    auto* container = value == nullptr ? nullptr : std::get_if<Container>(&value->value);
    if (container == nullptr) malformed();
    return *container;
  }

 private:
  std::size_t bottom() const { return marks_.empty() ? 0 : marks_.back(); }

  std::vector<Item> items_;
  std::vector<std::size_t> marks_;  // the size of the stack at each mark
};

}  // namespace gpipe::pickle
