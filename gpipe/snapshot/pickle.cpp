#include "gpipe/snapshot/pickle.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include "gpipe/snapshot/pickle_input.h"
#include "gpipe/snapshot/pickle_stack.h"
#include "gpipe/snapshot/stored_tensors.h"

namespace gpipe {
namespace {

using pickle::Arguments;
using pickle::Global;
using pickle::Hooks;
using pickle::Item;
using pickle::malformed;
using pickle::refuse;

/// Limit on lists, dicts and tuples nested in each other. A snapshot has six levels.
constexpr int kMaxDepth = 32;
/// Limit on the total size of the strings and tuples that are put into the memo and taken from it, relative to the size
/// of the pickle. Each time makes a copy.
constexpr std::uint64_t kMaxCopies = 16;

constexpr char kOrderedDict[] = "collections.OrderedDict";
constexpr char kRebuildTensor[] = "torch._utils._rebuild_tensor_v2";

std::int64_t integer(const Item& item) {
  const auto* value = item.plain<std::int64_t>();
  if (value == nullptr) malformed();
  return *value;
}

std::vector<std::int64_t> integers(const Item& item) {
  const auto* tuple = item.plain<Plain::Tuple>();
  if (tuple == nullptr) malformed();
  std::vector<std::int64_t> values;
  for (const auto& each : tuple->items) {
    const auto* value = std::get_if<std::int64_t>(&each.value);
    if (value == nullptr) malformed();
    values.push_back(*value);
  }
  return values;
}

/// The approximate size of a value that can be in the memo.
std::uint64_t weight(const Plain& plain) {
  if (const auto* text = std::get_if<std::string>(&plain.value)) return 1 + text->size();
  std::uint64_t sum = 1;
  if (const auto* tuple = std::get_if<Plain::Tuple>(&plain.value)) {
    for (const auto& item : tuple->items) sum += weight(item);
  }
  return sum;
}

/// Checks that a dict has no key twice.
void check_keys(const Plain& plain) {
  const auto* dict = std::get_if<Plain::Dict>(&plain.value);
  if (dict == nullptr) return;
  std::vector<std::string_view> keys;
  for (const auto& entry : *dict) keys.push_back(entry.key);
  std::sort(keys.begin(), keys.end());
  const auto twice = std::adjacent_find(keys.begin(), keys.end());
  if (twice != keys.end()) refuse("has a dict with the key '" + std::string(*twice) + "' twice");
}

/// Interprets the opcodes of pickle protocol 2 that LibTorch and torch.save use. The comments in Python's
/// pickletools.py describe them.
class Unpickler {
 public:
  Unpickler(std::string_view pickle, const ZipRecords& records)
      : input_(pickle), tensors_(records), copies_left_(kMaxCopies * pickle.size()) {}

  Plain run() {
    if (input_.take(2) != "\x80\x02") refuse("is not of protocol 2");
    for (;;) {
      const auto opcode = input_.take(1).front();
      if (opcode == '.') break;
      step(opcode);
    }
    if (!input_.at_end() || stack_.has_marks()) malformed();
    auto value = plain(stack_.pop());
    if (!stack_.empty()) malformed();
    return value;
  }

 private:
  void step(char opcode) {
    switch (opcode) {
      case 'N':
        return stack_.push(Plain{});
      case '\x88':
        return stack_.push(Plain{true});
      case '\x89':
        return stack_.push(Plain{false});
      case 'K':
        return stack_.push(Plain{static_cast<std::int64_t>(input_.number(1))});
      case 'M':
        return stack_.push(Plain{static_cast<std::int64_t>(input_.number(2))});
      case 'J':
        return stack_.push(Plain{std::int64_t{static_cast<std::int32_t>(input_.number(4))}});
      case '\x8a':
        return stack_.push(Plain{input_.long_integer()});
      case 'G':
        return stack_.push(Plain{input_.real()});
      case 'X':
        return stack_.push(Plain{std::string(input_.take(input_.number(4)))});
      case '}':
        return stack_.push(Plain{Plain::Dict()}, 1);
      case ']':
        return stack_.push(Plain{Plain::List()}, 1);
      case ')':
        return stack_.push(Plain{Plain::Tuple()}, 1);
      case '(':
        return stack_.mark();
      case 't':
        return push_tuple(stack_.pop_to_mark());
      case '\x85':
        return push_tuple(stack_.pop(1));
      case '\x86':
        return push_tuple(stack_.pop(2));
      case '\x87':
        return push_tuple(stack_.pop(3));
      case 'a':
        return append(stack_.pop(1));
      case 'e':
        return append(stack_.pop_to_mark());
      case 's':
        return set_items(stack_.pop(2));
      case 'u':
        return set_items(stack_.pop_to_mark());
      case 'q':
        return put(input_.number(1));
      case 'r':
        return put(input_.number(4));
      case 'h':
        return get(input_.number(1));
      case 'j':
        return get(input_.number(4));
      case 'c':
        return push_global();
      case 'Q':
        return push_storage(stack_.pop());
      case 'R':
        return reduce();
      default:
        refuse("has the unsupported opcode " + std::to_string(static_cast<unsigned char>(opcode)));
    }
  }

  /// The item's value, which must be plain.
  static Plain plain(Item item) {
    auto* value = std::get_if<Plain>(&item.what);
    if (value == nullptr) malformed();
    check_keys(*value);
    return std::move(*value);
  }
  /// The same for an item that becomes a part of a list, dict or tuple: updates the depth of `whole`.
  static Plain part(Item item, Item& whole) {
    whole.depth = std::max(whole.depth, item.depth + 1);
    if (whole.depth > kMaxDepth) refuse("is nested more than " + std::to_string(kMaxDepth) + " levels deep");
    return plain(std::move(item));
  }

  void push_tuple(std::vector<Item> items) {
    const auto is_plain = [](const Item& item) { return std::holds_alternative<Plain>(item.what); };
    const auto is_arguments = [](const Item& item) { return std::holds_alternative<Arguments>(item.what); };
    if (std::any_of(items.begin(), items.end(), is_arguments)) malformed();
    if (!std::all_of(items.begin(), items.end(), is_plain)) return stack_.push(Arguments{std::move(items)});
    Item tuple{Plain(), 1};
    Plain::Tuple parts;
    for (auto& item : items) parts.items.push_back(part(std::move(item), tuple));
    std::get<Plain>(tuple.what).value = std::move(parts);
    stack_.push(std::move(tuple));
  }
  void append(std::vector<Item> items) {
    auto& list = stack_.top_container<Plain::List>();
    for (auto& item : items) list.push_back(part(std::move(item), stack_.top()));
  }
  void set_items(std::vector<Item> items) {
    auto& dict = stack_.top_container<Plain::Dict>();
    if (items.size() % 2 != 0) malformed();
    for (std::size_t i = 0; i < items.size(); i += 2) {
      const auto* key = items[i].plain<std::string>();
      if (key == nullptr) refuse("has a dict with a key that is not a str");
      dict.push_back({*key, part(std::move(items[i + 1]), stack_.top())});
    }
  }

  /// Whether the pickle can use the item again. It cannot use a list or dict again: these can still grow and could come
  /// to contain themselves. It cannot use a tuple of tuples again: the size could double with each level.
  static bool is_reusable(const Item& item) {
    if (std::holds_alternative<Arguments>(item.what)) return false;
    return item.depth == 0 || (item.depth == 1 && item.plain<Plain::Tuple>() != nullptr);
  }
  /// Counts a copy of the item.
  void charge(const Item& item) {
    const auto* value = std::get_if<Plain>(&item.what);
    if (value == nullptr) return;
    const auto size = weight(*value);
    if (size > copies_left_) refuse("repeats its strings too often");
    copies_left_ -= size;
  }
  void put(std::uint64_t index) {
    const auto& item = stack_.top();
    if (!is_reusable(item)) {
      memo_.insert_or_assign(index, std::nullopt);
      return;
    }
    charge(item);
    memo_.insert_or_assign(index, item);
  }
  void get(std::uint64_t index) {
    const auto found = memo_.find(index);
    if (found == memo_.end()) malformed();
    if (!found->second) refuse("contains a list, a dict or a nested tuple twice; save a copy instead");
    charge(*found->second);
    stack_.push(*found->second);
  }

  void push_global() {
    auto name = input_.line();
    name += "." + input_.line();
    if (name != kOrderedDict && name != kRebuildTensor && !element_type(name)) {
      refuse("refers to '" + name + "'; it can contain tensors, numbers, strings, and dicts, lists and tuples of them");
    }
    stack_.push(Global{std::move(name)});
  }
  void push_storage(Item identifier) {
    auto* arguments = std::get_if<Arguments>(&identifier.what);
    if (arguments == nullptr || arguments->items.size() != 5) malformed();
    const auto& items = arguments->items;
    const auto* kind = items[0].plain<std::string>();
    const auto* global = std::get_if<Global>(&items[1].what);
    const auto* key = items[2].plain<std::string>();
    const auto type = global == nullptr ? std::nullopt : element_type(global->name);
    if (kind == nullptr || *kind != "storage" || !type || key == nullptr) malformed();
    stack_.push(tensors_.get(*key, *type, integer(items[4])));
  }
  void reduce() {
    const auto arguments = stack_.pop();
    const auto function = stack_.pop();
    const auto* global = std::get_if<Global>(&function.what);
    if (global == nullptr) malformed();
    if (global->name == kOrderedDict) {
      const auto* items = arguments.plain<Plain::Tuple>();
      if (items == nullptr || !items->items.empty()) malformed();
      return stack_.push(Hooks());
    }
    const auto* items = std::get_if<Arguments>(&arguments.what);
    if (global->name != kRebuildTensor || items == nullptr || items->items.size() != 6) malformed();
    stack_.push(Plain{tensor(items->items)});
  }
  /// The arguments are: storage, offset, sizes, strides, whether it requires grad, hooks.
  static at::Tensor tensor(const std::vector<Item>& arguments) {
    const auto* stored = std::get_if<Stored>(&arguments[0].what);
    if (stored == nullptr || !std::holds_alternative<Hooks>(arguments[5].what)) malformed();
    return make_tensor(*stored, integer(arguments[1]), integers(arguments[2]), integers(arguments[3]));
  }

  pickle::Input input_;
  pickle::Stack stack_;
  StoredTensors tensors_;
  std::uint64_t copies_left_;
  std::unordered_map<std::uint64_t, std::optional<Item>> memo_;  // std::nullopt for an item that is not reusable
};

}  // namespace

Plain read_pickle(std::string_view pickle, const ZipRecords& records) { return Unpickler(pickle, records).run(); }

}  // namespace gpipe
