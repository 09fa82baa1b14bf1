#pragma once

#include <cstdint>

namespace gpipe {

/// A hash of numbers in order (FNV-1a), the same in all processes.
class Hash {
 public:
  void add(std::int64_t number) { value_ = (value_ ^ static_cast<std::uint64_t>(number)) * 1099511628211u; }
  std::uint64_t value() const { return value_; }

 private:
  std::uint64_t value_ = 14695981039346656037u;
};

}  // namespace gpipe
