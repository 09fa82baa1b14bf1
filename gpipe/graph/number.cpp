#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <string_view>
#include <tuple>

#include "gpipe/base/checks.h"
#include "gpipe/graph/argument.h"

namespace gpipe {
namespace {

std::int64_t floor_division(std::int64_t a, std::int64_t b) {
  TORCH_CHECK_VALUE(b != 0 && (b != -1 || a != std::numeric_limits<std::int64_t>::min()), "a size is ", a, " // ", b);
  return a / b - (a % b != 0 && (a < 0) != (b < 0) ? 1 : 0);
}

std::int64_t floor_remainder(std::int64_t a, std::int64_t b) {
  TORCH_CHECK_VALUE(b != 0, "a size is ", a, " % ", b);
  if (b == -1) return 0;  // a % b overflows for the least a
  return a % b + (a % b != 0 && (a < 0) != (b < 0) ? b : 0);
}

/// How to compute a number from one.
struct Function {
  std::string_view name;
  double (*of)(double);
  bool is_integer = false;  ///< the result
};

constexpr std::array kFunctions{
    Function{"floor", [](double a) { return std::floor(a); }, true},
    Function{"ceil", [](double a) { return std::ceil(a); }, true},
    Function{"trunc", [](double a) { return std::trunc(a); }, true},
    Function{"round", [](double a) { return std::nearbyint(a); }, true},
    Function{"float", [](double a) { return a; }},
    Function{"sqrt", [](double a) { return std::sqrt(a); }},
    Function{"exp", [](double a) { return std::exp(a); }},
    Function{"log", [](double a) { return std::log(a); }},
};

/// How to compute a number from two. Further operands follow from left to right.
struct Rule {
  std::string_view name;
  std::int64_t (*of_integers)(std::int64_t, std::int64_t);  ///< null if the result is a float
  double (*of_floats)(double, double);
  bool is_condition = false;
};

std::int64_t sum(std::int64_t a, std::int64_t b) {
  std::int64_t result = 0;
  TORCH_CHECK_VALUE(!__builtin_add_overflow(a, b, &result), "a size is ", a, " + ", b);
  return result;
}

std::int64_t product(std::int64_t a, std::int64_t b) {
  std::int64_t result = 0;
  TORCH_CHECK_VALUE(!__builtin_mul_overflow(a, b, &result), "a size is ", a, " * ", b);
  return result;
}

template <typename Of>
constexpr Rule rule(std::string_view name, Of of, bool is_condition = false) {
  return {name, of, of, is_condition};
}

constexpr std::array kRules{
    Rule{"+", sum, [](double a, double b) { return a + b; }},
    Rule{"*", product, [](double a, double b) { return a * b; }},
    Rule{"//", floor_division, [](double a, double b) { return std::floor(a / b); }},
    Rule{"%", floor_remainder, [](double a, double b) { return a - b * std::floor(a / b); }},
    rule("min", [](auto a, auto b) { return std::min(a, b); }),
    rule("max", [](auto a, auto b) { return std::max(a, b); }),
    Rule{"/", nullptr, [](double a, double b) { return a / b; }},
    Rule{"**", nullptr, [](double a, double b) { return std::pow(a, b); }},
    rule(
        "<", [](auto a, auto b) -> decltype(a) { return a < b; }, true),
    rule(
        "<=", [](auto a, auto b) -> decltype(a) { return a <= b; }, true),
    rule(
        "==", [](auto a, auto b) -> decltype(a) { return a == b; }, true),
    rule(
        "!=", [](auto a, auto b) -> decltype(a) { return a != b; }, true),
};

std::int64_t integer(const c10::IValue& each) { return each.isBool() ? std::int64_t{each.toBool()} : each.toInt(); }

double real(const c10::IValue& each) { return each.isDouble() ? each.toDouble() : static_cast<double>(integer(each)); }

c10::IValue combine(const Function& function, const c10::IValue& operand) {
  const double result = function.of(real(operand));
  if (!function.is_integer) return result;
  TORCH_CHECK_VALUE(std::abs(result) < 0x1p63, "a size is ", result);
  return static_cast<std::int64_t>(result);
}

c10::IValue combine(const Rule& rule, const std::vector<c10::IValue>& operands) {
  const auto is_integer = [](const c10::IValue& each) { return !each.isDouble(); };
  c10::IValue result = operands.front();
  for (auto next = operands.begin() + 1; next != operands.end(); ++next) {
    if (rule.of_integers != nullptr && is_integer(result) && is_integer(*next)) {
      result = rule.of_integers(integer(result), integer(*next));
    } else {
      result = rule.of_floats(real(result), real(*next));
    }
  }
  return rule.is_condition ? c10::IValue(real(result) != 0) : result;
}

/// Returns the place of a name in a list; its end if it is not there.
template <typename List>
std::size_t find(const List& list, const nlohmann::json& name) {
  const auto found = std::find_if(list.begin(), list.end(), [&](const auto& each) { return name == each.name; });
  return static_cast<std::size_t>(found - list.begin());
}

}  // namespace

Argument Argument::number(const nlohmann::json& description) {
  Argument made;
  made.read_number(description);
  return made;
}

void Argument::read_number(const nlohmann::json& description) {
  if (description.is_boolean()) {
    constant_ = description.get<bool>();
  } else if (description.is_number_float()) {
    constant_ = description.get<double>();
  } else if (description.is_number()) {
    constant_ = description.get<std::int64_t>();
  } else if (description.is_object() && description.contains("size")) {
    kind_ = Kind::kSize;
    std::tie(index_, dimension_) = description["size"].get<std::pair<std::size_t, std::int64_t>>();
  } else if (description.is_array() && description.size() >= 2) {
    const auto& name = description.front();
    for (auto each = description.begin() + 1; each != description.end(); ++each) parts_.push_back(number(*each));
    if (name == "and" || name == "or") {
      kind_ = name == "and" ? Kind::kAnd : Kind::kOr;
    } else if (index_ = find(kFunctions, name); index_ < kFunctions.size() && parts_.size() == 1) {
      kind_ = Kind::kFunction;
    } else if (index_ = find(kRules, name); index_ < kRules.size()) {
      kind_ = Kind::kRule;
    } else {
      refuse_argument("the model has the number ", description.dump().substr(0, 100), ", which this version lacks");
    }
  } else {
    refuse_argument("the model has ", description.dump().substr(0, 100), " in the place of a number");
  }
}

c10::IValue Argument::evaluate_number(const Frame& frame) const {
  if (kind_ == Kind::kSize) {
    const auto& value = frame.values.at(index_);
    TORCH_CHECK_VALUE(value.isTensor(), "a size is of a value that is not a tensor");
    return value.toTensor().size(dimension_);
  }
  if (kind_ == Kind::kAnd || kind_ == Kind::kOr) {
    const bool decides = kind_ == Kind::kOr;
    const auto is_decided = [&](const Argument& operand) { return (real(operand.evaluate(frame)) != 0) == decides; };
    return std::any_of(parts_.begin(), parts_.end(), is_decided) == decides;
  }
  std::vector<c10::IValue> operands;
  for (const auto& operand : parts_) operands.push_back(operand.evaluate(frame));
  return kind_ == Kind::kFunction ? combine(kFunctions[index_], operands.front()) : combine(kRules[index_], operands);
}

}  // namespace gpipe
