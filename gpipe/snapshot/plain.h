#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <iterator>
#include <string>
#include <variant>
#include <vector>

namespace gpipe {

/// A value that a snapshot's file can contain: a tree of Python's plain types.
struct Plain {
  struct Tuple {
    std::vector<Plain> items;
  };
  using List = std::vector<Plain>;
  struct Entry;
  using Dict = std::vector<Entry>;  ///< in the file's order; keys are unique

  /// std::monostate stands for None.
  std::variant<std::monostate, bool, std::int64_t, double, std::string, at::Tensor, Tuple, List, Dict> value;
};
struct Plain::Entry {
  std::string key;
  Plain value;
};

/// Returns the name of the value's type in Python, such as "dict".
inline const char* type_of(const Plain& plain) {
  constexpr const char* kNames[] = {"None", "bool", "int", "float", "str", "Tensor", "tuple", "list", "dict"};
  static_assert(std::size(kNames) == std::variant_size_v<decltype(Plain::value)>);
  return kNames[plain.value.index()];
}

}  // namespace gpipe
