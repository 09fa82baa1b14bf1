#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>

namespace gpipe::pickle {

[[noreturn]] inline void refuse(const std::string& what) { throw std::runtime_error("the pickle " + what); }
[[noreturn]] inline void malformed() { refuse("is malformed"); }

/// Reads the arguments of a pickle's opcodes. Errors: std::runtime_error if the pickle ends too early.
class Input {
 public:
  /// The bytes must outlive this object.
  explicit Input(std::string_view bytes) : rest_(bytes) {}

  bool at_end() const { return rest_.empty(); }

  std::string_view take(std::uint64_t size) {
    if (size > rest_.size()) malformed();
    const auto taken = rest_.substr(0, size);
    rest_.remove_prefix(size);
    return taken;
  }

  /// Reads an unsigned little-endian number of `size` <= 8 bytes.
  std::uint64_t number(std::size_t size) {
    const auto bytes = take(size);
    std::uint64_t value = 0;
    for (auto byte = bytes.rbegin(); byte != bytes.rend(); ++byte) {
      value = value << 8 | static_cast<unsigned char>(*byte);
    }
    return value;
  }

  /// Reads one byte with a size, then a signed little-endian number of that size.
  std::int64_t long_integer() {
    const auto size = number(1);
    if (size > 8) refuse("has an integer of more than 64 bits; save it as a str");
    if (size == 0) return 0;
    const auto unused = 64 - 8 * size;
    return static_cast<std::int64_t>(number(size) << unused) >> unused;
  }

  /// Reads a big-endian double.
  double real() {
    std::uint64_t bits = 0;
    for (const char byte : take(8)) bits = bits << 8 | static_cast<unsigned char>(byte);
    return std::bit_cast<double>(bits);
  }

  /// Reads the text up to the next newline, which is skipped.
  std::string line() {
    const auto end = rest_.find('\n');
    if (end == rest_.npos) malformed();
    const std::string text(take(end));
    take(1);
    return text;
  }

 private:
  std::string_view rest_;
};

}  // namespace gpipe::pickle
