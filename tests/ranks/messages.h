#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "gpipe/ranks/wire.h"

namespace gpipe::testing {

/// The memory of a message of plain bytes. Its layout has the sizes of the values and of each piece, as text.
class Bytes : public Incoming {
 public:
  explicit Bytes(std::string_view layout) {
    std::istringstream in{std::string(layout)};
    std::size_t size = 0;
    while (in >> size) {
      if (size > std::size_t{1} << 30) break;
      strings.push_back(std::string(size, '?'));
    }
    if (!in.eof() || strings.empty()) throw std::runtime_error("the layout is malformed: " + std::string(layout));
  }

  std::span<std::byte> values() override { return bytes(strings.front()); }
  std::vector<std::span<std::byte>> pieces() override {
    std::vector<std::span<std::byte>> pieces;
    for (std::size_t i = 1; i < strings.size(); ++i) pieces.push_back(bytes(strings[i]));
    return pieces;
  }

  std::vector<std::string> strings;  ///< the values, then the pieces

 private:
  static std::span<std::byte> bytes(std::string& string) { return std::as_writable_bytes(std::span(string)); }
};

inline std::unique_ptr<Incoming> allocate(std::string_view layout) { return std::make_unique<Bytes>(layout); }

/// A message of the values, then the pieces.
inline Outgoing message(std::vector<std::string> strings) {
  const auto owner = std::make_shared<std::vector<std::string>>(std::move(strings));
  Outgoing result;
  result.values = owner->front();
  for (const auto& string : *owner) {
    result.layout += (result.layout.empty() ? "" : " ") + std::to_string(string.size());
    if (&string != &owner->front()) result.pieces.push_back(std::as_bytes(std::span(string)));
  }
  result.owner = owner;
  return result;
}

inline std::vector<std::string> strings(std::unique_ptr<Incoming> message) {
  return std::move(static_cast<Bytes&>(*message).strings);
}

}  // namespace gpipe::testing
