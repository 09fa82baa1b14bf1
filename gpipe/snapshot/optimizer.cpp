#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <cmath>
#include <memory>
#include <type_traits>
#include <typeinfo>
#include <unordered_map>

#include "gpipe/base/checks.h"
#include "gpipe/snapshot/capture.h"

namespace gpipe {
namespace {

namespace optim = torch::optim;
using nlohmann::json;

// The members of the classes of options and states, for both capture and restore. Members of one name are alike.

/// Calls `field(name, value)` for each option.
void each_option(auto& of, auto field) {
  field("lr", of.lr());
  field("weight_decay", of.weight_decay());
  if constexpr (requires { of.eps(); }) field("eps", of.eps());
  if constexpr (requires { of.betas(); }) field("betas", of.betas());
  if constexpr (requires { of.amsgrad(); }) field("amsgrad", of.amsgrad());
  if constexpr (requires { of.momentum(); }) field("momentum", of.momentum());
  if constexpr (requires { of.dampening(); }) field("dampening", of.dampening());
  if constexpr (requires { of.nesterov(); }) field("nesterov", of.nesterov());
  if constexpr (requires { of.alpha(); }) field("alpha", of.alpha());
  if constexpr (requires { of.centered(); }) field("centered", of.centered());
  if constexpr (requires { of.lr_decay(); }) field("lr_decay", of.lr_decay());
  if constexpr (requires { of.initial_accumulator_value(); }) {
    field("initial_accumulator_value", of.initial_accumulator_value());
  }
}

/// Calls `field(name, value)` for each number of a parameter's state and `field(name, tensor, needed)` for each tensor.
/// `needed` says whether the state must have the tensor, which can depend on an option.
void each_state(auto& of, const auto& with, auto field) {
  if constexpr (requires { of.step(); }) field("step", of.step());
  if constexpr (requires { of.sum(); }) field("sum", of.sum(), true);
  if constexpr (requires { of.exp_avg(); }) {
    field("exp_avg", of.exp_avg(), true);
    field("exp_avg_sq", of.exp_avg_sq(), true);
    field("max_exp_avg_sq", of.max_exp_avg_sq(), with.amsgrad());
  }
  if constexpr (requires { of.square_avg(); }) {
    field("square_avg", of.square_avg(), true);
    field("grad_avg", of.grad_avg(), with.centered());
    field("momentum_buffer", of.momentum_buffer(), with.momentum() > 0);
  } else if constexpr (requires { of.momentum_buffer(); }) {
    field("momentum_buffer", of.momentum_buffer(), true);
  }
}

template <class... Parts>
[[noreturn]] void refuse_optimizer(const Parts&... what) {
  refuse_argument("the snapshot is of another optimizer: ", what...);
}

/// Puts the fields of an object of one of these classes into `to`, and its tensors into the part.
struct Capture {
  json& to;
  SnapshotPart& part;
  std::string owner = "";

  void operator()(const char* name, const std::tuple<double, double>& value) const {
    to[name] = tagged("tuple", {std::get<0>(value), std::get<1>(value)});
  }
  void operator()(const char* name, double value) const {
    to[name] = std::isfinite(value) ? json(value)
                                    : tagged("float", std::isnan(value) ? "nan"
                                                      : value > 0       ? "inf"
                                                                        : "-inf");
  }
  void operator()(const char* name, bool value) const { to[name] = value; }
  void operator()(const char* name, std::int64_t value) const { to[name] = value; }
  /// An undefined tensor has not been needed so far and is left out.
  void operator()(const char* name, const at::Tensor& value, bool) const {
    if (!value.defined()) return;
    const auto place = ".optimizer/" + owner + "/" + name;
    to[name] = tagged("tensor", place);
    part.state[place] = value;
  }
};

/// Sets the fields of such an object. Tensors get the device of `parameter`, which has their kind. Options have none.
struct Restore {
  const json& from;
  SnapshotReader& reader;
  std::string owner;
  at::Tensor parameter = {};

  void operator()(const char* name, double& value) const { value = number(name, get(name)); }
  void operator()(const char* name, bool& value) const {
    if (!get(name).is_boolean()) wrong(name);
    value = get(name).get<bool>();
  }
  void operator()(const char* name, std::int64_t& value) const {
    // Python's optimizers count in a tensor of no dimension.
    const auto counted = content_of(get(name), "tensor") != nullptr ? tensor(name) : at::Tensor();
    if (counted.defined() ? counted.dim() != 0 : !get(name).is_number_integer()) wrong(name);
    value = counted.defined() ? counted.item<std::int64_t>() : get(name).get<std::int64_t>();
  }
  void operator()(const char* name, std::tuple<double, double>& value) const {
    const auto* pair = content_of(get(name), "tuple");
    if (pair == nullptr || pair->size() != 2) wrong(name);
    value = {number(name, (*pair)[0]), number(name, (*pair)[1])};
  }
  void operator()(const char* name, at::Tensor& value, bool needed) const {
    if (!needed && !from.contains(name)) return;
    const auto saved = tensor(name);
    if (description_of(saved) != description_of(parameter)) wrong(name);
    value = saved.to(parameter.device());
  }

  /// Python's optimizers also take an int.
  double number(const char* name, const json& value) const {
    const auto* text = content_of(value, "float");
    if (!value.is_number() && text == nullptr) wrong(name);
    return text != nullptr ? std::stod(text->get<std::string>()) : value.get<double>();
  }
  at::Tensor tensor(const char* name) const {
    const auto* place = content_of(get(name), "tensor");
    if (place == nullptr || !reader.contains(*place)) wrong(name);
    return reader.read(*place);
  }
  const json& get(const char* name) const {
    if (!from.is_object() || !from.contains(name)) wrong(name);
    return from.at(name);
  }
  [[noreturn]] void wrong(const char* name) const {
    refuse_optimizer("its '", name, "' of ", owner, " is missing or has another type or shape");
  }
};

/// Refuses options of Python's optimizers that LibTorch's lack and that change the result.
void check_options(const json& saved) {
  for (const auto& group : saved.at("param_groups")) {
    for (const std::string name : {"maximize", "decoupled_weight_decay"}) {
      if (group.value(name, json()) != true || (saved.at("type") != "Adam" && name != "maximize")) continue;
      refuse_optimizer("its '", name, "' is true, which LibTorch lacks");
    }
  }
}

/// Calls `call.template operator()<Options, ParamState>(name)` with the classes that belong to the optimizer.
template <class Call>
auto with_classes_of(const optim::Optimizer& optimizer, Call call) {
  const auto& type = typeid(optimizer);
  using namespace optim;
  if (type == typeid(Adagrad)) return call.template operator()<AdagradOptions, AdagradParamState>("Adagrad");
  if (type == typeid(Adam)) return call.template operator()<AdamOptions, AdamParamState>("Adam");
  if (type == typeid(AdamW)) return call.template operator()<AdamWOptions, AdamWParamState>("AdamW");
  if (type == typeid(RMSprop)) return call.template operator()<RMSpropOptions, RMSpropParamState>("RMSprop");
  if (type == typeid(SGD)) return call.template operator()<SGDOptions, SGDParamState>("SGD");
  refuse_argument("cannot capture or restore an optimizer of the class ", type.name(),
                  ": use LibTorch's Adagrad, Adam, AdamW, RMSprop or SGD");
}

std::vector<std::vector<std::string>> names_of(const optim::Optimizer& optimizer, const NamedTensors& parameters) {
  std::unordered_map<const void*, std::string> names;
  for (const auto& item : parameters) names.emplace(item.value().unsafeGetTensorImpl(), item.key());
  std::vector<std::vector<std::string>> groups;
  for (std::size_t g = 0; g < optimizer.param_groups().size(); ++g) {
    auto& group = groups.emplace_back();
    for (const auto& parameter : optimizer.param_groups()[g].params()) {
      const auto found = names.find(parameter.unsafeGetTensorImpl());
      if (found == names.end()) {
        refuse_argument("parameter ", group.size(), " in group ", g,
                        " of the optimizer does not belong to the model: make the optimizer from the model's "
                        "parameters, after moving the model to its device");
      }
      group.push_back(found->second);
    }
  }
  return groups;
}

/// Checks that both have the same groups of parameters, in any order within a group, as far as they are on this rank.
void check_groups(const std::vector<std::vector<std::string>>& names, const json& saved,
                  const std::set<std::string>& elsewhere) {
  const auto& groups = saved.at("param_groups");
  if (names.size() != groups.size()) {
    refuse_optimizer("it has ", groups.size(), " groups of parameters, but this one has ", names.size());
  }
  for (std::size_t g = 0; g < names.size(); ++g) {
    const auto theirs = groups[g].at("params").get<std::set<std::string>>();
    const std::set<std::string> ours(names[g].begin(), names[g].end());
    for (const auto& name : ours) {
      if (!theirs.contains(name)) refuse_optimizer("group ", g, " lacks '", name, "'");
    }
    for (const auto& name : theirs) {
      if (!ours.contains(name) && !elsewhere.contains(name)) refuse_optimizer("group ", g, " also has '", name, "'");
    }
  }
}

}  // namespace

void capture_optimizer(SnapshotPart& part, const optim::Optimizer& optimizer, const NamedTensors& parameters) {
  const auto names = names_of(optimizer, parameters);
  with_classes_of(optimizer, [&]<class Options, class ParamState>(const char* type) {
    auto& captured = part.manifest["optimizer"];
    captured = {{"type", type}, {"param_groups", json::array()}, {"state", json::object()}};
    for (std::size_t g = 0; g < names.size(); ++g) {
      const auto& group = optimizer.param_groups()[g];
      auto& to = captured["param_groups"].emplace_back(json{{"params", names[g]}});
      auto options = static_cast<const Options&>(group.options());
      each_option(options, Capture{to, part});
      for (std::size_t i = 0; i < names[g].size(); ++i) {
        const auto found = optimizer.state().find(group.params()[i].unsafeGetTensorImpl());
        if (found == optimizer.state().end()) continue;
        auto state = static_cast<const ParamState&>(*found->second);
        each_state(state, options, Capture{captured["state"][names[g][i]], part, names[g][i]});
      }
    }
  });
}

std::function<void()> optimizer_of(SnapshotReader& reader, const OwnState& own, optim::Optimizer& optimizer) {
  const auto names = names_of(optimizer, own.parameters);
  if (!reader.manifest().contains("optimizer")) refuse_optimizer("it has none");
  const auto& saved = reader.manifest().at("optimizer");
  return with_classes_of(optimizer, [&]<class Options, class ParamState>(const char* type) -> std::function<void()> {
    if (saved.at("type") != type)
      refuse_optimizer("it is of type ", saved.at("type").dump(), ", but this one of '", type, "'");
    check_groups(names, saved, own.elsewhere);
    check_options(saved);
    auto options = std::make_shared<std::vector<std::unique_ptr<Options>>>();
    auto states = std::make_shared<std::remove_reference_t<decltype(optimizer.state())>>();
    for (std::size_t g = 0; g < names.size(); ++g) {
      const auto& group = optimizer.param_groups()[g];
      options->push_back(std::make_unique<Options>(static_cast<const Options&>(group.options())));
      each_option(*options->back(), Restore{saved.at("param_groups")[g], reader, "group " + std::to_string(g)});
      for (std::size_t i = 0; i < names[g].size(); ++i) {
        if (!saved.at("state").contains(names[g][i])) continue;
        auto state = std::make_unique<ParamState>();
        const auto& from = saved.at("state")[names[g][i]];
        each_state(*state, *options->back(), Restore{from, reader, "'" + names[g][i] + "'", group.params()[i]});
        (*states)[group.params()[i].unsafeGetTensorImpl()] = std::move(state);
      }
    }
    return [=, &optimizer] {
      for (std::size_t g = 0; g < options->size(); ++g) {
        optimizer.param_groups()[g].set_options(std::move((*options)[g]));
      }
      optimizer.state() = std::move(*states);
    };
  });
}

}  // namespace gpipe
