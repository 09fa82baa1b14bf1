#include <ATen/MemoryOverlap.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <memory>
#include <sstream>
#include <type_traits>
#include <typeinfo>
#include <unordered_map>

#include "gpipe/base/checks.h"
#include "gpipe/snapshot.h"

namespace gpipe {
namespace {

namespace optim = torch::optim;

/// Describes a tensor's type, shape and layout, unless strided. Tensors of equal kinds can be copied into each other.
std::string description_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return "undefined";
  std::ostringstream text;
  text << tensor.scalar_type() << tensor.sizes();
  if (tensor.layout() != at::kStrided) text << ' ' << tensor.layout();
  if (tensor.is_meta()) text << " without data";
  if (tensor.is_quantized()) text << ' ' << c10::toString(tensor.qscheme());
  return text.str();
}

at::Tensor copy_on(const at::Device& device, const at::Tensor& tensor) {
  return tensor.detach().to(device, /*non_blocking=*/false, /*copy=*/true);
}

/// The model's tensors, not copies.
NamedTensors tensors_of(const torch::nn::Module& model) {
  NamedTensors tensors;
  tensors.update(model.named_parameters());
  tensors.update(model.named_buffers());
  return tensors;
}

void check_writable(const std::string& name, const at::Tensor& tensor) {
  if (at::has_internal_overlap(tensor) == at::MemOverlap::Yes) {
    refuse_argument("cannot restore '", name, "' of this model: some of its elements share memory; clone it first");
  }
  if (tensor.is_inference() && !c10::InferenceMode::is_enabled()) {
    refuse_argument("cannot restore '", name, "' of this model: it was made in inference mode; clone it first");
  }
}

void check_same_kind(const std::string& name, const std::string& saved, const std::string& own) {
  if (saved != own) {
    refuse_argument("the snapshot is of another model: '", name, "' is ", saved, " in the snapshot and ", own,
                    " in this model");
  }
}

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

/// Copies the fields of an object of one of these classes to `to`.
struct Capture {
  Fields& to;

  template <class Value>
  void operator()(const char* name, const Value& value) const {
    to[name] = value;
  }
  /// An undefined tensor has not been needed so far and is left out.
  void operator()(const char* name, const at::Tensor& value, bool) const {
    if (value.defined()) to[name] = copy_on(at::kCPU, value);
  }
};

/// Sets the fields of such an object. Tensors get the device of `parameter`, which has their kind. Options have none.
struct Restore {
  const Fields& from;
  std::string owner;
  at::Tensor parameter = {};

  void operator()(const char* name, double& value) const { value = number(name, get(name, &c10::IValue::isScalar)); }
  void operator()(const char* name, bool& value) const { value = get(name, &c10::IValue::isBool).toBool(); }
  void operator()(const char* name, std::int64_t& value) const {
    // Python's optimizers count in a tensor of no dimension.
    const auto found = from.find(name);
    const bool in_tensor = found != from.end() && found->second.isTensor() && found->second.toTensor().dim() == 0;
    value = in_tensor ? found->second.toTensor().item<std::int64_t>() : get(name, &c10::IValue::isInt).toInt();
  }
  void operator()(const char* name, std::tuple<double, double>& value) const {
    const auto& pair = get(name, &c10::IValue::isTuple).toTupleRef().elements();
    if (pair.size() != 2) wrong(name);
    value = {number(name, pair[0]), number(name, pair[1])};
  }
  void operator()(const char* name, at::Tensor& value, bool needed) const {
    if (!needed && !from.contains(name)) return;
    const auto& tensor = get(name, &c10::IValue::isTensor).toTensor();
    if (description_of(tensor) != description_of(parameter)) wrong(name);
    value = copy_on(parameter.device(), tensor);
  }

  /// Python's optimizers also take an int.
  double number(const char* name, const c10::IValue& value) const {
    if (!value.isDouble() && !value.isInt()) wrong(name);
    return value.toScalar().toDouble();
  }
  const c10::IValue& get(const char* name, bool (c10::IValue::*is)() const) const {
    const auto found = from.find(name);
    if (found == from.end() || !(found->second.*is)()) wrong(name);
    return found->second;
  }
  [[noreturn]] void wrong(const char* name) const {
    refuse_optimizer("its '", name, "' of ", owner, " is missing or has another type or shape");
  }
};

/// Refuses options of Python's optimizers that LibTorch's lack and that change the result.
void check_options(const OptimizerState& saved) {
  for (const auto& group : saved.param_groups) {
    for (const std::string name : {"maximize", "decoupled_weight_decay"}) {
      const auto found = group.options.find(name);
      if (found == group.options.end() || !found->second.isBool() || !found->second.toBool()) continue;
      if (saved.type == "Adam" || name == "maximize")
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

std::vector<std::vector<std::string>> names_of(const optim::Optimizer& optimizer, const torch::nn::Module& model) {
  std::unordered_map<const void*, std::string> names;
  for (const auto& item : model.named_parameters()) names.emplace(item.value().unsafeGetTensorImpl(), item.key());
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

/// Checks that both have the same groups of parameters, in any order within a group.
void check_groups(const std::vector<std::vector<std::string>>& names, const OptimizerState& saved) {
  if (names.size() != saved.param_groups.size()) {
    refuse_optimizer("it has ", saved.param_groups.size(), " groups of parameters, but this one has ", names.size());
  }
  for (std::size_t g = 0; g < names.size(); ++g) {
    auto ours = names[g];
    auto theirs = saved.param_groups[g].params;
    std::ranges::sort(ours);
    std::ranges::sort(theirs);
    const auto [our, their] = std::ranges::mismatch(ours, theirs);
    if (our == ours.end() && their == theirs.end()) continue;
    const bool missing = their == theirs.end() || (our != ours.end() && *our < *their);
    refuse_optimizer("group ", g, missing ? " lacks '" : " also has '", missing ? *our : *their, "'");
  }
}

}  // namespace

NamedTensors capture_model(const torch::nn::Module& model) {
  NamedTensors copies;
  for (const auto& item : tensors_of(model)) copies.insert(item.key(), copy_on(at::kCPU, item.value()));
  return copies;
}

void restore_model(torch::nn::Module& model, const NamedTensors& saved) {
  auto tensors = tensors_of(model);
  for (const auto& item : tensors) {
    const auto* found = saved.find(item.key());
    check_same_kind(item.key(), found == nullptr ? "missing" : description_of(*found), description_of(item.value()));
    check_writable(item.key(), item.value());
  }
  for (const auto& item : saved) {
    if (!tensors.contains(item.key())) check_same_kind(item.key(), description_of(item.value()), "missing");
  }
  const c10::AutoGradMode no_gradients(false);
  for (auto& item : tensors) item.value().copy_(saved[item.key()]);
}

OptimizerState capture_optimizer(const optim::Optimizer& optimizer, const torch::nn::Module& model) {
  const auto names = names_of(optimizer, model);
  OptimizerState captured;
  with_classes_of(optimizer, [&]<class Options, class ParamState>(const char* type) {
    captured.type = type;
    for (std::size_t g = 0; g < names.size(); ++g) {
      const auto& group = optimizer.param_groups()[g];
      auto& to = captured.param_groups.emplace_back();
      to.params = names[g];
      auto options = static_cast<const Options&>(group.options());
      each_option(options, Capture{to.options});
      for (std::size_t i = 0; i < names[g].size(); ++i) {
        const auto found = optimizer.state().find(group.params()[i].unsafeGetTensorImpl());
        if (found == optimizer.state().end()) continue;
        auto state = static_cast<const ParamState&>(*found->second);
        each_state(state, options, Capture{captured.state[names[g][i]]});
      }
    }
  });
  return captured;
}

void restore_optimizer(optim::Optimizer& optimizer, const torch::nn::Module& model, const OptimizerState& saved) {
  const auto names = names_of(optimizer, model);
  with_classes_of(optimizer, [&]<class Options, class ParamState>(const char* type) {
    if (saved.type != type) refuse_optimizer("it is of type '", saved.type, "', but this one is of type '", type, "'");
    check_groups(names, saved);
    check_options(saved);
    std::vector<std::unique_ptr<Options>> options;
    std::remove_reference_t<decltype(optimizer.state())> states;
    for (std::size_t g = 0; g < names.size(); ++g) {
      const auto& group = optimizer.param_groups()[g];
      options.push_back(std::make_unique<Options>(static_cast<const Options&>(group.options())));
      each_option(*options.back(), Restore{saved.param_groups[g].options, "group " + std::to_string(g)});
      for (std::size_t i = 0; i < names[g].size(); ++i) {
        const auto found = saved.state.find(names[g][i]);
        if (found == saved.state.end()) continue;
        auto state = std::make_unique<ParamState>();
        each_state(*state, *options.back(), Restore{found->second, "'" + names[g][i] + "'", group.params()[i]});
        states[group.params()[i].unsafeGetTensorImpl()] = std::move(state);
      }
    }
    if (states.size() != saved.state.size())
      refuse_optimizer("it has state of a parameter that this one does not have");
    // Everything fits. From here on nothing can fail.
    for (std::size_t g = 0; g < names.size(); ++g) optimizer.param_groups()[g].set_options(std::move(options[g]));
    optimizer.state() = std::move(states);
  });
}

}  // namespace gpipe
