#include "gpipe/graph/argument.h"

#include <ATen/ops/scalar_tensor.h>

#include <algorithm>
#include <array>
#include <limits>
#include <string_view>
#include <utility>

#include "gpipe/base/checks.h"

namespace gpipe {
namespace {

using Json = nlohmann::json;

[[noreturn]] void refuse(const Json& what, const std::string& reason) {
  refuse_argument("the model has the argument ", what.dump().substr(0, 100), ", ", reason);
}

std::size_t index_in(const Json& object, const char* name) {
  if (!object[name].is_number_unsigned()) refuse(object, "whose number is not one");
  return object[name].get<std::size_t>();
}

// Names as PyTorch prints them, without "torch.".

template <typename T>
T find_named(const Json& name, const std::vector<std::pair<std::string_view, T>>& known) {
  for (const auto& [text, value] : known) {
    if (name == text) return value;
  }
  refuse(name, "which this version does not know");
}

at::ScalarType dtype_named(const Json& name) {
  const auto& known = c10::getStringToDtypeMap();
  const auto found = known.find(name.get<std::string>());
  if (found == known.end()) refuse(name, "which this version of torch does not have");
  return found->second;
}

at::Layout layout_named(const Json& name) {
  return find_named<at::Layout>(
      name, {{"strided", at::kStrided}, {"sparse_coo", at::kSparse}, {"sparse_csr", at::kSparseCsr}});
}

at::MemoryFormat memory_format_named(const Json& name) {
  return find_named<at::MemoryFormat>(name, {{"contiguous_format", at::MemoryFormat::Contiguous},
                                             {"preserve_format", at::MemoryFormat::Preserve},
                                             {"channels_last", at::MemoryFormat::ChannelsLast},
                                             {"channels_last_3d", at::MemoryFormat::ChannelsLast3d}});
}

double real_named(const Json& name) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  return find_named<double>(
      name, {{"inf", kInfinity}, {"-inf", -kInfinity}, {"nan", std::numeric_limits<double>::quiet_NaN()}});
}

/// A Python number in the place of a tensor: a tensor that does not decide about the type of the result.
at::Tensor wrapped(const at::Scalar& number) {
  const auto type = number.isBoolean() ? at::kBool : number.isIntegral(false) ? at::kLong : at::kDouble;
  auto tensor = at::scalar_tensor(number, at::device(at::kCPU).dtype(number.isComplex() ? at::kComplexDouble : type));
  tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
  return tensor;
}

/// Returns the type without Optional, and int for a symbolic integer.
c10::TypePtr plain(c10::TypePtr type) {
  if (const auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
  if (type->kind() == c10::TypeKind::SymIntType) return c10::IntType::get();
  return type;
}

/// Gives a number the type that an operator declares. Errors: std::invalid_argument if it cannot have it.
c10::IValue typed(const c10::IValue& number, const c10::TypePtr& type) {
  switch (type->kind()) {
    case c10::TypeKind::AnyType:
    case c10::TypeKind::NumberType:
      return number;
    case c10::TypeKind::TensorType:
      return wrapped(number.toScalar());
    case c10::TypeKind::BoolType:
      if (number.isBool()) return number;
      break;
    case c10::TypeKind::IntType:
      if (number.isInt()) return number;
      if (number.isBool()) return static_cast<std::int64_t>(number.toBool());
      break;
    case c10::TypeKind::FloatType:
      if (number.isDouble()) return number;
      if (number.isInt()) return static_cast<double>(number.toInt());
      break;
    default:
      break;
  }
  refuse_argument("the model passes a number of type ", number.tagKind(), " where an operator takes ", type->str());
}

}  // namespace

Argument::Argument(const Json& description, const c10::TypePtr& type) {
  const auto wanted = plain(type ? type : c10::AnyType::get());
  switch (description.type()) {
    case Json::value_t::null:
      return;
    case Json::value_t::object:
      read_object(description, wanted);
      return;
    case Json::value_t::array:
      read_list(description, wanted);
      return;
    case Json::value_t::boolean:
      constant_ = typed(description.get<bool>(), wanted);
      return;
    case Json::value_t::number_unsigned:
      if (description.get<std::uint64_t>() > std::uint64_t{std::numeric_limits<std::int64_t>::max()}) break;
      [[fallthrough]];
    case Json::value_t::number_integer:
      constant_ = typed(description.get<std::int64_t>(), wanted);
      return;
    case Json::value_t::number_float:
      constant_ = typed(description.get<double>(), wanted);
      return;
    case Json::value_t::string:
      if (wanted->kind() == c10::TypeKind::StringType || wanted->kind() == c10::TypeKind::AnyType) {
        constant_ = description.get<std::string>();
        return;
      }
      break;
    default:
      break;
  }
  refuse(description, "where its operator takes " + wanted->str());
}

void Argument::read_list(const Json& list, const c10::TypePtr& type) {
  if (type->kind() == c10::TypeKind::AnyType) {
    type_ = type;
  } else if (const auto of_lists = type->cast<c10::ListType>()) {
    type_ = of_lists->getElementType();
    if (type_->kind() == c10::TypeKind::SymIntType) type_ = c10::IntType::get();
  } else {
    refuse(list, "where its operator takes " + type->str());
  }
  kind_ = Kind::kList;
  for (const auto& each : list) parts_.emplace_back(each, type_);
  if (!std::ranges::all_of(parts_, [](auto& part) { return part.kind_ == Kind::kConstant; })) return;
  constant_ = evaluate({{}, /*training=*/false, at::kCPU});
  kind_ = Kind::kConstant;
  parts_.clear();
}

void Argument::read_object(const Json& object, const c10::TypePtr& type) {
  const auto named = [&](const char* name) { return object.size() == 1 && object.contains(name); };
  const auto set_named = [&](c10::TypeKind kind, auto value) {
    const bool fits = type->kind() == kind || type->kind() == c10::TypeKind::AnyType;
    if (!fits) refuse(object, "where its operator takes " + type->str());
    constant_ = static_cast<std::int64_t>(value);
  };
  if (named("value")) {
    kind_ = Kind::kValue;
    index_ = index_in(object, "value");
    type_ = type;
  } else if (named("device")) {
    kind_ = Kind::kDevice;
  } else if (named("size")) {
    read_number(object["size"]);
    type_ = type;
    if (kind_ == Kind::kConstant) constant_ = typed(constant_, type);
  } else if (named("float")) {
    constant_ = typed(real_named(object["float"]), type);
  } else if (named("complex")) {
    const auto parts = object["complex"].get<std::array<double, 2>>();
    constant_ = typed(c10::complex<double>(parts[0], parts[1]), type);
  } else if (named("dtype")) {
    set_named(c10::TypeKind::ScalarTypeType, dtype_named(object["dtype"]));
  } else if (named("layout")) {
    set_named(c10::TypeKind::LayoutType, layout_named(object["layout"]));
  } else if (named("memory format")) {
    set_named(c10::TypeKind::MemoryFormatType, memory_format_named(object["memory format"]));
  } else if (object.contains("training")) {
    kind_ = Kind::kChoice;
    for (const auto* mode : {"training", "evaluation"}) parts_.emplace_back(object.at(mode), type);
  } else {
    refuse(object, "which this version does not know");
  }
}

c10::IValue Argument::evaluate(const Frame& frame) const {
  switch (kind_) {
    case Kind::kConstant:
      return constant_;
    case Kind::kValue: {
      const auto& value = frame.values[index_];
      return value.isScalar() ? typed(value, type_) : value;  // a number that the model computes from tensors
    }
    case Kind::kDevice:
      return frame.device;
    case Kind::kChoice:
      return parts_[frame.training ? 0 : 1].evaluate(frame);
    case Kind::kList: {
      c10::impl::GenericList list(type_);
      list.reserve(parts_.size());
      for (const auto& part : parts_) list.push_back(part.evaluate(frame));
      return list;
    }
    default:
      const auto number = evaluate_number(frame);
      return type_ ? typed(number, type_) : number;
  }
}

void Argument::add_values(std::vector<std::size_t>& values) const {
  if (kind_ == Kind::kValue || kind_ == Kind::kSize) values.push_back(index_);
  for (const auto& part : parts_) part.add_values(values);
}

}  // namespace gpipe
