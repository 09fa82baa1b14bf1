#include "gpipe/snapshot/pickle.h"

#include <ATen/ops/empty.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/ScalarType.h>
#include <c10/core/Storage.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

namespace gpipe {
namespace {

/// Of lists, dicts and tuples in one another. A snapshot has six.
constexpr int kMaxDepth = 32;
/// How much larger than the pickle the strings and tuples may be that it uses again.
constexpr std::uint64_t kMaxRepetition = 16;

[[noreturn]] void refuse(const std::string& what) { throw std::runtime_error("it is not a snapshot: " + what); }
[[noreturn]] void damaged_record(const std::string& what) { throw std::runtime_error("it is damaged: " + what); }
[[noreturn]] void malformed() { refuse("its pickle is malformed"); }

constexpr char kOrderedDict[] = "collections.OrderedDict";
constexpr char kRebuildTensor[] = "torch._utils._rebuild_tensor_v2";

using enum at::ScalarType;
constexpr at::ScalarType kTypes[] = {Float, Double, Half, BFloat16, Long,         Int,
                                     Short, Char,   Byte, Bool,     ComplexFloat, ComplexDouble};

std::optional<at::ScalarType> element_type(std::string_view storage_class) {
  for (const auto type : kTypes) {
    if (storage_class == std::string("torch.") + c10::toString(type) + "Storage") return type;
  }
  return {};
}

// What lies on a pickle's stack besides plain values.

struct Global {
  std::string name;
};
struct Stored {
  at::Storage storage;
  at::ScalarType type;
};
/// The hooks of a tensor: an empty OrderedDict.
struct Hooks {};
struct Item;
/// A tuple with such things in it.
struct Arguments {
  std::vector<Item> items;
};
struct Item {
  std::variant<Plain, Global, Stored, Hooks, Arguments> what;
  int depth = 0;  ///< of lists, dicts and tuples

  template <class Value>
  const Value* plain() const {
    const auto* value = std::get_if<Plain>(&what);
    return value == nullptr ? nullptr : std::get_if<Value>(&value->value);
  }
};

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

/// Whether a tensor lies inside a storage of so many elements, and has no more.
bool fits(std::int64_t offset, const std::vector<std::int64_t>& sizes, const std::vector<std::int64_t>& strides,
          std::int64_t elements) {
  if (sizes.size() != strides.size() || offset < 0 || offset > elements) return false;
  std::int64_t count = 1;
  std::int64_t last = offset;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] < 0 || strides[i] < 0 || __builtin_mul_overflow(count, sizes[i], &count)) return false;
    std::int64_t distance = 0;
    if (sizes[i] > 1 && (__builtin_mul_overflow(sizes[i] - 1, strides[i], &distance) ||
                         __builtin_add_overflow(last, distance, &last))) {
      return false;
    }
  }
  return count == 0 || (count <= elements && last < elements);
}

std::uint64_t weight(const Plain& plain) {
  if (const auto* text = std::get_if<std::string>(&plain.value)) return 1 + text->size();
  std::uint64_t sum = 1;
  if (const auto* tuple = std::get_if<Plain::Tuple>(&plain.value)) {
    for (const auto& item : tuple->items) sum += weight(item);
  }
  return sum;
}

void check_keys(const Plain& plain) {
  const auto* dict = std::get_if<Plain::Dict>(&plain.value);
  if (dict == nullptr) return;
  std::vector<std::string_view> keys;
  for (const auto& entry : *dict) keys.push_back(entry.key);
  std::sort(keys.begin(), keys.end());
  const auto twice = std::adjacent_find(keys.begin(), keys.end());
  if (twice != keys.end()) refuse("a dict has the key '" + std::string(*twice) + "' twice");
}

/// A machine for the opcodes of pickle protocol 2, as the comments in Python's pickletools.py describe them.
class Unpickler {
 public:
  Unpickler(std::string_view pickle, const ZipRecords& records)
      : rest_(pickle), records_(records), repetition_left_(kMaxRepetition * pickle.size()) {}

  Plain run() {
    if (take(2) != "\x80\x02") refuse("its pickle is not of protocol 2");
    for (;;) {
      const auto opcode = take(1).front();
      if (opcode == '.') break;
      step(opcode);
    }
    if (!rest_.empty() || !marks_.empty()) malformed();
    auto value = plain(pop());
    if (!stack_.empty()) malformed();
    return value;
  }

 private:
  void step(char opcode) {
    switch (opcode) {
      case 'N':
        return push(Plain{});
      case '\x88':
        return push(Plain{true});
      case '\x89':
        return push(Plain{false});
      case 'K':
        return push(Plain{static_cast<std::int64_t>(number(1))});
      case 'M':
        return push(Plain{static_cast<std::int64_t>(number(2))});
      case 'J':
        return push(Plain{std::int64_t{static_cast<std::int32_t>(number(4))}});
      case '\x8a':
        return push(Plain{long_integer()});
      case 'G':
        return push(Plain{real()});
      case 'X':
        return push(Plain{std::string(take(number(4)))});
      case '}':
        return push(Plain{Plain::Dict()}, 1);
      case ']':
        return push(Plain{Plain::List()}, 1);
      case ')':
        return push(Plain{Plain::Tuple()}, 1);
      case '(':
        return marks_.push_back(stack_.size());
      case 't':
        return push_tuple(pop_to_mark());
      case '\x85':
        return push_tuple(pop(1));
      case '\x86':
        return push_tuple(pop(2));
      case '\x87':
        return push_tuple(pop(3));
      case 'a':
        return append(pop(1));
      case 'e':
        return append(pop_to_mark());
      case 's':
        return set_items(pop(2));
      case 'u':
        return set_items(pop_to_mark());
      case 'q':
        return put(number(1));
      case 'r':
        return put(number(4));
      case 'h':
        return get(number(1));
      case 'j':
        return get(number(4));
      case 'c':
        return push_global();
      case 'Q':
        return push_storage(pop());
      case 'R':
        return reduce();
      default:
        refuse("its pickle has the opcode " + std::to_string(static_cast<unsigned char>(opcode)));
    }
  }

  std::string_view take(std::uint64_t size) {
    if (size > rest_.size()) malformed();
    const auto taken = rest_.substr(0, size);
    rest_.remove_prefix(size);
    return taken;
  }
  /// Unsigned, the lowest byte first.
  std::uint64_t number(std::size_t size) {
    const auto bytes = take(size);
    std::uint64_t value = 0;
    for (auto byte = bytes.rbegin(); byte != bytes.rend(); ++byte)
      value = value << 8 | static_cast<unsigned char>(*byte);
    return value;
  }
  std::int64_t long_integer() {
    const auto size = number(1);
    if (size > 8) refuse("it has an integer of more than 64 bits");
    if (size == 0) return 0;
    const auto unused = 64 - 8 * size;
    return static_cast<std::int64_t>(number(size) << unused) >> unused;
  }
  /// The highest byte first.
  double real() {
    std::uint64_t bits = 0;
    for (const char byte : take(8)) bits = bits << 8 | static_cast<unsigned char>(byte);
    return std::bit_cast<double>(bits);
  }
  std::string line() {
    const auto end = rest_.find('\n');
    if (end == rest_.npos) malformed();
    const std::string text(take(end));
    take(1);
    return text;
  }

  template <class What>
  void push(What what, int depth = 0) {
    stack_.push_back({std::move(what), depth});
  }
  std::vector<Item> pop(std::size_t count) {
    const auto bottom = marks_.empty() ? 0 : marks_.back();
    if (stack_.size() - bottom < count) malformed();
    const auto first = stack_.end() - static_cast<std::ptrdiff_t>(count);
    std::vector<Item> items(std::make_move_iterator(first), std::make_move_iterator(stack_.end()));
    stack_.erase(first, stack_.end());
    return items;
  }
  Item pop() { return std::move(pop(1).front()); }
  std::vector<Item> pop_to_mark() {
    if (marks_.empty()) malformed();
    auto items = pop(stack_.size() - marks_.back());
    marks_.pop_back();
    return items;
  }
  Item& top() {
    if (stack_.size() == (marks_.empty() ? 0 : marks_.back())) malformed();
    return stack_.back();
  }
  /// The list or dict on top.
  template <class Container>
  Container& top_container() {
    auto* value = std::get_if<Plain>(&top().what);
    auto* container = value == nullptr ? nullptr : std::get_if<Container>(&value->value);
    if (container == nullptr) malformed();
    return *container;
  }

  static Plain plain(Item item) {
    auto* value = std::get_if<Plain>(&item.what);
    if (value == nullptr) malformed();
    check_keys(*value);
    return std::move(*value);
  }
  /// The same as a part of a list, dict or tuple.
  static Plain part(Item item, Item& whole) {
    whole.depth = std::max(whole.depth, item.depth + 1);
    if (whole.depth > kMaxDepth) refuse("it is nested more than " + std::to_string(kMaxDepth) + " levels deep");
    return plain(std::move(item));
  }

  void push_tuple(std::vector<Item> items) {
    const auto is_plain = [](const Item& item) { return std::holds_alternative<Plain>(item.what); };
    const auto is_arguments = [](const Item& item) { return std::holds_alternative<Arguments>(item.what); };
    if (std::any_of(items.begin(), items.end(), is_arguments)) malformed();
    if (!std::all_of(items.begin(), items.end(), is_plain)) return push(Arguments{std::move(items)});
    Item tuple{Plain(), 1};
    Plain::Tuple parts;
    for (auto& item : items) parts.items.push_back(part(std::move(item), tuple));
    std::get<Plain>(tuple.what).value = std::move(parts);
    stack_.push_back(std::move(tuple));
  }
  void append(std::vector<Item> items) {
    auto& list = top_container<Plain::List>();
    for (auto& item : items) list.push_back(part(std::move(item), top()));
  }
  void set_items(std::vector<Item> items) {
    auto& dict = top_container<Plain::Dict>();
    if (items.size() % 2 != 0) malformed();
    for (std::size_t i = 0; i < items.size(); i += 2) {
      const auto* key = items[i].plain<std::string>();
      if (key == nullptr) refuse("a dict has a key that is not a str");
      dict.push_back({*key, part(std::move(items[i + 1]), top())});
    }
  }

  /// Lists and dicts can still grow, so that one that is used again could contain itself. Tuples that contain others
  /// could double with each level.
  static bool may_be_used_again(const Item& item) {
    if (std::holds_alternative<Arguments>(item.what)) return false;
    return item.depth == 0 || (item.depth == 1 && item.plain<Plain::Tuple>() != nullptr);
  }
  void put(std::uint64_t index) {
    memo_.insert_or_assign(index, may_be_used_again(top()) ? std::optional(top()) : std::nullopt);
  }
  void get(std::uint64_t index) {
    const auto found = memo_.find(index);
    if (found == memo_.end()) malformed();
    if (!found->second) refuse("it holds a list, a dict or a tuple twice; save a copy instead");
    if (const auto* value = std::get_if<Plain>(&found->second->what)) {
      const auto size = weight(*value);
      if (size > repetition_left_) refuse("it repeats its strings too often");
      repetition_left_ -= size;
    }
    stack_.push_back(*found->second);
  }

  void push_global() {
    auto name = line();
    name += "." + line();
    if (name != kOrderedDict && name != kRebuildTensor && !element_type(name)) refuse("it names '" + name + "'");
    push(Global{std::move(name)});
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
    const auto name = "data/" + *key;
    const auto record = records_.find(name);
    if (record == records_.end()) refuse("it has no record '" + name + "'");
    const auto size = record->second.size();
    const auto count = integer(items[4]);
    const auto element = c10::elementSize(*type);
    if (count < 0 || size % element != 0 || static_cast<std::uint64_t>(count) != size / element) {
      damaged_record("its record '" + name + "' has " + std::to_string(size) + " bytes, not " + std::to_string(count) +
                     " elements of " + std::to_string(element));
    }
    auto [storage, added] = storages_.try_emplace(name);
    if (added) {
      auto* allocator = c10::GetCPUAllocator();
      auto data = allocator->allocate(size);
      if (size != 0) std::memcpy(data.get(), record->second.data(), size);
      storage->second = at::Storage(at::Storage::use_byte_size_t(), size, std::move(data), allocator, true);
    }
    push(Stored{storage->second, *type});
  }
  void reduce() {
    const auto arguments = pop();
    const auto function = pop();
    const auto* global = std::get_if<Global>(&function.what);
    if (global == nullptr) malformed();
    if (global->name == kOrderedDict) {
      const auto* items = arguments.plain<Plain::Tuple>();
      if (items == nullptr || !items->items.empty()) malformed();
      return push(Hooks());
    }
    const auto* items = std::get_if<Arguments>(&arguments.what);
    if (global->name != kRebuildTensor || items == nullptr || items->items.size() != 6) malformed();
    push(Plain{tensor(items->items)});
  }
  /// Of: storage, offset, sizes, strides, whether it requires grad, hooks.
  static at::Tensor tensor(const std::vector<Item>& arguments) {
    const auto* stored = std::get_if<Stored>(&arguments[0].what);
    if (stored == nullptr || !std::holds_alternative<Hooks>(arguments[5].what)) malformed();
    const auto offset = integer(arguments[1]);
    const auto sizes = integers(arguments[2]);
    const auto strides = integers(arguments[3]);
    const auto elements = stored->storage.nbytes() / c10::elementSize(stored->type);
    if (!fits(offset, sizes, strides, static_cast<std::int64_t>(elements))) {
      damaged_record("a tensor lies outside its record of " + std::to_string(elements) + " elements");
    }
    return at::empty({0}, at::TensorOptions(stored->type)).set_(stored->storage, offset, sizes, strides);
  }

  std::string_view rest_;
  const ZipRecords& records_;
  std::uint64_t repetition_left_;
  std::vector<Item> stack_;
  std::vector<std::size_t> marks_;  // how high the stack was at each
  std::unordered_map<std::uint64_t, std::optional<Item>> memo_;
  std::map<std::string, at::Storage> storages_;
};

}  // namespace

bool is_saveable(c10::ScalarType type) { return std::ranges::find(kTypes, type) != std::end(kTypes); }

Plain read_pickle(std::string_view pickle, const ZipRecords& records) { return Unpickler(pickle, records).run(); }

}  // namespace gpipe
