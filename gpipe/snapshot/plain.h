#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <iterator>
#include <string>
#include <variant>
#include <vector>

namespace gpipe {

/// A value that a snapshot's file can hold. It is a tree: nothing refers to what contains it.
struct Plain {
  struct Tuple {
    std::vector<Plain> items;
  };
  using List = std::vector<Plain>;
  struct Entry;
  using Dict = std::vector<Entry>;  ///< in the file's order; each key once

  /// The first stands for None.
  std::variant<std::monostate, bool, std::int64_t, double, std::string, at::Tensor, Tuple, List, Dict> value;
};
struct Plain::Entry {
  std::string key;
  Plain value;
};

/// The type's name in Python, such as "dict".
inline const char* type_of(const Plain& plain) {
  constexpr const char* kNames[] = {"None", "bool", "int", "float", "str", "Tensor", "tuple", "list", "dict"};
  static_assert(std::size(kNames) == std::variant_size_v<decltype(Plain::value)>);
  return kNames[plain.value.index()];
}

}  // namespace gpipe
