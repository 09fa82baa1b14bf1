#pragma once

#include <ATen/core/ivalue.h>

#include <cstdint>
#include <nlohmann/json.hpp>
#include <vector>

namespace gpipe {

/// A number that depends on sizes of inputs, such as the number of samples. Immutable. Thread-safe.
class Number {
 public:
  /// See Graph for the description. Errors: std::invalid_argument for anything else.
  explicit Number(const nlohmann::json& description);

  /// An integer, a float or a boolean. Errors: c10::Error for a division by zero and for integers out of range.
  c10::IValue evaluate(const std::vector<std::int64_t>& sizes) const;

  /// The largest number of a size that it uses, plus 1.
  std::size_t sizes() const;

 private:
  enum class Kind { kConstant, kSize, kFunction, kRule, kAnd, kOr };

  Kind kind_ = Kind::kConstant;
  c10::IValue constant_;
  std::size_t index_ = 0;  ///< of the size, function or rule
  std::vector<Number> operands_;
};

}  // namespace gpipe
