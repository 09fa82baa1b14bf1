#pragma once

#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>

#include <nlohmann/json.hpp>

#include <cstdint>
#include <utility>
#include <vector>

namespace gpipe {

/// What arguments are computed from while a graph runs.
struct Frame {
  std::vector<c10::IValue> values;
  bool training = false;
  at::Device device;
};

/// An argument of an operator. Immutable. Thread-safe.
class Argument {
 public:
  /// Reads an argument of a type. A null `type` stands for any: lists then hold anything.
  /// Errors: std::invalid_argument for what is not an argument, or does not have the type.
  Argument(const nlohmann::json& description, const c10::TypePtr& type);

  /// A constant.
  explicit Argument(c10::IValue constant) : constant_(std::move(constant)) {}

  /// Reads an integer, a float or a boolean that depends on sizes of tensors; see Graph. Errors: std::invalid_argument for
  /// anything else.
  static Argument number(const nlohmann::json& description);

  /// Errors of a number: c10::Error for a division by zero, for integers out of range, and for a size of a value that is
  /// not a tensor with the dimension.
  c10::IValue evaluate(const Frame& frame) const;

  /// Adds the numbers of the values that it uses, or whose sizes it uses.
  void add_values(std::vector<std::size_t>& values) const;

 private:
  enum class Kind { kConstant, kValue, kList, kChoice, kDevice, kSize, kFunction, kRule, kAnd, kOr };

  Kind kind_ = Kind::kConstant;
  c10::IValue constant_;
  std::size_t index_ = 0;        ///< of the value, function or rule
  std::int64_t dimension_ = 0;   ///< of a size
  std::vector<Argument> parts_;  ///< of a list; in training and evaluation mode; operands
  c10::TypePtr type_;            ///< of the value or number, or of a list's elements; null for an operand

  Argument() = default;
  void read_number(const nlohmann::json& description);
  c10::IValue evaluate_number(const Frame& frame) const;
  void read_list(const nlohmann::json& list, const c10::TypePtr& type);
  void read_object(const nlohmann::json& object, const c10::TypePtr& type);
};

}  // namespace gpipe
