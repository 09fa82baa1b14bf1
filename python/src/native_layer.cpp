#include "python/src/native_layer.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <string>
#include <utility>

#include "python/src/values.h"

namespace gpipe::python {
namespace {

namespace py = pybind11;

constexpr std::array kHooks{"_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"};

/// Returns tensors of their own, to find out where others come from.
std::vector<at::Tensor> marks(std::size_t count) {
  std::vector<at::Tensor> marks;
  for (std::size_t i = 0; i < count; ++i) marks.push_back(at::empty({0}));
  return marks;
}

/// Nullopt for an undefined tensor, and for one that is not among the marks.
std::optional<std::size_t> index_among(const std::vector<at::Tensor>& marks, const at::Tensor& tensor) {
  const auto found = std::find_if(marks.begin(), marks.end(), [&](const auto& mark) { return mark.is_same(tensor); });
  if (!tensor.defined() || found == marks.end()) return std::nullopt;
  return static_cast<std::size_t>(found - marks.begin());
}

}  // namespace

struct NativeLayer::State {
  std::shared_ptr<const Graph::State> values;
  std::shared_ptr<const Order> input;   ///< null unless the layer is the first
  std::shared_ptr<const Order> output;  ///< null unless the layer is the last
};

std::unique_ptr<NativeLayer> NativeLayer::make(PyObject* object, const std::vector<SkipKey>& keys) {
  const py::handle module = object;
  const auto kind = py::module_::import("gpipe.exported.layer").attr("ExportedLayer");
  if (!py::type::of(module).is(kind)) return nullptr;
  const auto graph = module.attr("_graph").cast<std::shared_ptr<Graph>>();
  if (!graph->python_functions().empty()) return nullptr;
  std::unique_ptr<NativeLayer> layer(new NativeLayer(object, graph));
  layer->is_first_ = !module.attr("_input").is_none();
  layer->is_last_ = !module.attr("_output").is_none();
  const auto keys_of = [&](const std::vector<std::string>& names) {
    std::vector<SkipKey> found;
    for (const auto& name : names) {
      found.push_back(*std::find_if(keys.begin(), keys.end(), [&](const SkipKey& key) { return key.name == name; }));
    }
    return found;
  };
  layer->keys_ = {{}, {}, keys_of(graph->pops()), keys_of(graph->peeks()), keys_of(graph->stashes())};
  return layer;
}

void NativeLayer::refresh(const std::shared_ptr<torch::nn::Module>& mirror) {
  const py::handle module = module_.get();
  const bool replaced = mirror != mirror_;
  if (replaced) {
    mirror_ = mirror;
    model_ = reference_to(py::object(module.attr("model")).ptr());
  }
  is_training_ = py::handle(model_.get()).attr("training").cast<bool>();
  if (!replaced && (!values_ || values_->training == is_training_)) return;
  auto fresh = std::make_shared<Graph::State>(keys_);
  fresh->training = is_training_;
  const auto parameters = mirror->named_parameters();
  const auto buffers = mirror->named_buffers();
  for (const auto& name : graph_->tensors()) {
    const auto dot = name.rfind('.');  // after the path of a module, if it is not the model
    const auto place = registered_name(dot == std::string::npos ? "model" : "model." + name.substr(0, dot));
    const auto key = place + "." + name.substr(dot + 1);
    const auto* found = parameters.find(key);
    if (found == nullptr) found = buffers.find(key);
    if (found == nullptr) {
      values_ = nullptr;
      return;
    }
    fresh->tensors.push_back(*found);
  }
  values_ = std::move(fresh);
}

bool NativeLayer::prepare(const Value* input) {
  if (!values_ || !is_plain(module_.get())) return false;
  auto fresh = std::make_shared<State>();
  fresh->values = values_;
  if (is_first_) {
    if (input == nullptr || !(fresh->input = order_of_input(*input))) return false;
    input_ = fresh->input;
  }
  if (is_last_) {
    auto& known = outputs_.at(is_training_ ? 1 : 0);
    if (!known) known = order_of_output();
    fresh->output = known;
  }
  std::shared_ptr<const State> old = std::move(fresh);  // destroyed without the mutex
  MutexLock lock(mutex_);
  state_.swap(old);
  return true;
}

std::shared_ptr<const NativeLayer::State> NativeLayer::state() const {
  MutexLock lock(mutex_);
  return state_;
}

Value NativeLayer::run(Value input, const State& state, const std::vector<Borrowed>& borrowed) const {
  const torch::PyWarningHandler warnings;
  std::vector<at::Tensor> tensors;
  if (state.input) {
    for (const auto& each : state.input->tensors) {
      tensors.push_back(each ? input.tensors().at(*each) : at::Tensor());
    }
    input = {};
  } else {
    tensors = std::move(input).tensors();
  }
  const auto* values = state.values.get();
  std::optional<Graph::State> with_stand_ins;
  for (const auto& [parameter, stand_in] : borrowed) {
    if (parameter.device() == stand_in.device()) continue;
    if (!with_stand_ins) values = &with_stand_ins.emplace(*values);
    for (auto& tensor : with_stand_ins->tensors) {
      if (tensor.is_same(parameter)) tensor = stand_in;
    }
  }
  auto outputs = graph_->run(std::move(tensors), *values);
  if (!state.output) return outputs.size() == 1 ? Value(std::move(outputs.front())) : Value(std::move(outputs));
  std::vector<at::Tensor> ordered;
  for (const auto& each : state.output->tensors) ordered.push_back(outputs.at(each.value()));
  return {state.output->form, std::move(ordered)};
}

std::shared_ptr<const NativeLayer::Order> NativeLayer::order_of_input(const Value& input) const {
  if (input_ && input_->form == input.form()) return input_;
  const auto given = marks(input.tensors().size());
  Order order{input.form(), {}};
  try {
    const auto leaves = py::handle(module_.get())
                            .attr("flattened")(to_python({input.form(), given}))
                            .cast<std::vector<std::optional<at::Tensor>>>();
    for (const auto& leaf : leaves) {
      order.tensors.push_back(leaf ? index_among(given, *leaf) : std::nullopt);
      if (leaf && !order.tensors.back()) return nullptr;  // a tensor of another class
    }
  } catch (const py::error_already_set&) {
    return nullptr;  // the layer's Python module raises it again, with a note
  }
  return std::make_shared<const Order>(std::move(order));
}

std::shared_ptr<const NativeLayer::Order> NativeLayer::order_of_output() const {
  const auto exist = graph_->has_outputs(values_->training);
  auto returned = marks(exist.size());
  for (std::size_t i = 0; i < exist.size(); ++i) {
    if (!exist[i]) returned[i] = at::Tensor();
  }
  const auto value = to_value(py::handle(module_.get()).attr("unflattened")(returned, is_training_));
  Order order{value.form(), {}};
  for (const auto& tensor : value.tensors()) order.tensors.push_back(index_among(returned, tensor));
  return std::make_shared<const Order>(std::move(order));
}

int NativeLayer::traverse(absl::FunctionRef<int(PyObject*)> visit) const {
  for (auto* object : {module_.get(), model_.get()}) {
    if (const int result = visit(object); result != 0) return result;
  }
  return 0;
}

bool is_plain(const py::handle& module) {
  const py::dict own = module.attr("__dict__");
  const auto is_empty = [&](const char* name) { return py::len(py::object(own[name])) == 0; };
  return !own.contains("forward") && module.attr("_compiled_call_impl").is_none() &&
         std::all_of(kHooks.begin(), kHooks.end(), is_empty);
}

bool calls_are_plain() {
  if (at::impl::torch_function_mode_enabled()) return false;
  const auto torch = py::module_::import("torch.nn.modules.module");
  return std::all_of(kHooks.begin(), kHooks.end(), [&](const std::string& name) {
    return py::len(py::object(torch.attr(("_global" + name).c_str()))) == 0;
  });
}

}  // namespace gpipe::python
