#pragma once

#include <ATen/core/ivalue.h>

#include <nlohmann/json.hpp>

namespace gpipe {

/// A number that depends on sizes of tensors, such as the number of samples. Immutable. Thread-safe.
class Number {
 public:
  /// See Graph for the description. Errors: std::invalid_argument for anything else.
  explicit Number(const nlohmann::json& description);

  /// An integer, a float or a boolean. Errors: c10::Error for a division by zero, for integers out of range, and for a
  /// value that is not a tensor with the dimension.
  c10::IValue evaluate(const std::vector<c10::IValue>& values) const;

  /// Adds the numbers of the values whose sizes it uses.
  void add_values(std::vector<std::size_t>& values) const;

 private:
  enum class Kind { kConstant, kSize, kFunction, kRule, kAnd, kOr };

  Kind kind_ = Kind::kConstant;
  c10::IValue constant_;
  std::size_t index_ = 0;  ///< of the value, function or rule
  std::int64_t dimension_ = 0;
  std::vector<Number> operands_;
};

}  // namespace gpipe
