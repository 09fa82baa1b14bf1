#include "python/src/native_layer.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <utility>

namespace gpipe::python {
namespace {

namespace py = pybind11;

constexpr std::array kHooks{"_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"};

}  // namespace

std::vector<at::Tensor> run_graph(const Graph& graph, std::vector<at::Tensor> inputs, const Graph::State& state) {
  auto outputs = graph.run(graph.with_constants(std::move(inputs)), state);
  std::erase_if(outputs, [](const at::Tensor& output) { return !output.defined(); });
  return outputs;
}

std::unique_ptr<NativeLayer> NativeLayer::make(const py::handle& module, const std::vector<SkipKey>& keys) {
  const auto kind = py::module_::import("gpipe.exported.layer").attr("ExportedLayer");
  if (!py::type::of(module).is(kind)) return nullptr;
  const auto graph = module.attr("_graph").cast<std::shared_ptr<Graph>>();
  if (!graph->python_functions().empty()) return nullptr;
  std::unique_ptr<NativeLayer> layer(new NativeLayer(graph));
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

void NativeLayer::refresh(const py::handle& module, bool replaced) {
  const bool training = module.attr("model").attr("training").cast<bool>();
  if (!replaced && values_ && values_->training == training) return;
  auto fresh = std::make_shared<Graph::State>(keys_);
  fresh->training = training;
  values_ = nullptr;
  for (const auto& tensor : module.attr("own_tensors")().cast<std::vector<std::optional<at::Tensor>>>()) {
    if (!tensor) return;
    fresh->tensors.push_back(*tensor);
  }
  values_ = std::move(fresh);
}

bool NativeLayer::prepare(const py::handle& module) {
  if (!values_ || !is_plain(module)) return false;
  auto old = values_;  // destroyed without the mutex
  MutexLock lock(mutex_);
  state_.swap(old);
  return true;
}

std::shared_ptr<const Graph::State> NativeLayer::state() const {
  MutexLock lock(mutex_);
  return state_;
}

Value NativeLayer::run(Value input, const Graph::State& state, const std::vector<Borrowed>& borrowed) const {
  const torch::PyWarningHandler warnings;
  const auto* values = &state;
  std::optional<Graph::State> with_stand_ins;
  for (const auto& [parameter, stand_in] : borrowed) {
    if (parameter.device() == stand_in.device()) continue;
    if (!with_stand_ins) values = &with_stand_ins.emplace(*values);
    for (auto& tensor : with_stand_ins->tensors) {
      if (tensor.is_same(parameter)) tensor = stand_in;
    }
  }
  auto outputs = run_graph(*graph_, std::move(input).tensors(), *values);
  return outputs.size() == 1 ? Value(std::move(outputs.front())) : Value(std::move(outputs));
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
