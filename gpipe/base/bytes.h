#pragma once

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

namespace gpipe {

/// Writes items as bytes for a rank that runs the same version. Each integer and enum takes 8 bytes.
class ByteWriter {
 public:
  template <typename... Items>
  void add(const Items&... items) {
    (append(items), ...);
  }
  std::string take() { return std::move(bytes_); }
  template <typename Item>
  using Written = std::conditional_t<std::is_integral_v<Item> || std::is_enum_v<Item>, std::int64_t, Item>;

 private:
  void append(const std::string& text) {
    append(text.size());
    bytes_ += text;
  }
  template <typename Item>
  void append(const std::vector<Item>& items) {
    append(items.size());
    for (const auto& item : items) append(item);
  }
  template <typename Item>
  void append(const Item& item) {
    static_assert(std::is_trivially_copyable_v<Item>);
    const auto written = static_cast<Written<Item>>(item);
    bytes_.append(reinterpret_cast<const char*>(&written), sizeof written);
  }
  std::string bytes_;
};

/// Reads what a ByteWriter has written, which must outlive this. Errors: std::runtime_error for bytes that end early.
class ByteReader {
 public:
  explicit ByteReader(std::string_view bytes) : left_(bytes) {}
  [[noreturn]] static void refuse() {
    throw std::runtime_error(
        "[gpipe] a message from another rank has a malformed layout; run the same version of gpipe on all ranks");
  }
  template <typename Item>
  Item get() {
    if constexpr (std::is_same_v<Item, std::string>) {
      return Item(take(get<std::size_t>()));
    } else if constexpr (requires { typename Item::allocator_type; }) {
      Item items(count(static_cast<std::int64_t>(left_.size())));
      for (auto& item : items) item = get<typename Item::value_type>();
      return items;
    } else {
      ByteWriter::Written<Item> written;
      std::memcpy(static_cast<void*>(&written), take(sizeof written).data(), sizeof written);
      return static_cast<Item>(written);
    }
  }
  /// A number from 0 to `most`. Errors: std::runtime_error for another one.
  std::int64_t count(std::int64_t most) {
    if (const auto count = get<std::int64_t>(); count >= 0 && count <= most) return count;
    refuse();
  }
  bool done() const { return left_.empty(); }

 private:
  std::string_view take(std::size_t count) {
    if (count > left_.size()) refuse();
    const auto taken = left_.substr(0, count);
    left_.remove_prefix(count);
    return taken;
  }
  std::string_view left_;
};

/// A hash of numbers in order (FNV-1a), the same in all processes.
class Hash {
 public:
  void add(std::int64_t number) { value_ = (value_ ^ static_cast<std::uint64_t>(number)) * 1099511628211u; }
  std::uint64_t value() const { return value_; }

 private:
  std::uint64_t value_ = 14695981039346656037u;
};

/// The bytes of items, for a rank that runs the same version.
template <typename Item>
std::string to_bytes(const std::vector<Item>& items) {
  ByteWriter bytes;
  for (const auto& item : items) bytes.add(item);
  return bytes.take();
}

/// The items of bytes that to_bytes() has returned.
template <typename Item>
std::vector<Item> to_items(const std::string& bytes) {
  std::vector<Item> items;
  for (ByteReader reader(bytes); !reader.done();) items.push_back(reader.get<Item>());
  return items;
}

}  // namespace gpipe
