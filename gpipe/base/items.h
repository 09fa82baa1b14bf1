#pragma once

#include <string>
#include <vector>

#include "gpipe/base/bytes.h"

namespace gpipe {

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
