#pragma once

#include <cstddef>
#include <cstring>
#include <string>
#include <type_traits>
#include <vector>

namespace gpipe {

/// The bytes of items, for a rank that runs the same version.
template <typename Item>
std::string to_bytes(const std::vector<Item>& items) {
  static_assert(std::is_trivially_copyable_v<Item>);
  return {reinterpret_cast<const char*>(items.data()), items.size() * sizeof(Item)};
}

/// The items of bytes that to_bytes() has returned.
template <typename Item>
std::vector<Item> to_items(const std::string& bytes) {
  static_assert(std::is_trivially_copyable_v<Item>);
  std::vector<Item> items(bytes.size() / sizeof(Item));
  if (!items.empty()) std::memcpy(static_cast<void*>(items.data()), bytes.data(), items.size() * sizeof(Item));
  return items;
}

}  // namespace gpipe
