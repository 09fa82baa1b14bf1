#include "python/src/pipeline.h"

#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>

#include <stdexcept>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_format.h"
#include "python/src/values.h"
#include "skip/namespace.h"

namespace gpipe::python {
namespace {

namespace py = pybind11;

/// The stage that this thread runs, whom its module tells which layer begins, and what is kept of the cell.
struct Running {
  PyObject* stage = nullptr;
  absl::FunctionRef<void(int)>* begin = nullptr;
  CellMemo* memo = nullptr;
};
thread_local Running running;

/// What a stage's module calls before each of its layers. The stage itself has begun the first.
void begin_layer(const py::handle& stage, int layer) {
  if (layer > 0 && running.stage == stage.ptr()) (*running.begin)(layer);
}

/// Keeps an object from a stage's forward of a micro-batch until its recompute.
void keep_for_recompute(const py::object& object) {
  if (running.memo != nullptr) *running.memo = reference_to(object.ptr());
}

/// What the forward kept, or None.
py::object kept_for_recompute() {
  if (running.memo == nullptr || *running.memo == nullptr) return py::none();
  return py::reinterpret_borrow<py::object>(static_cast<PyObject*>(running.memo->get()));
}

std::vector<SkipKey> to_keys(const py::handle& names) {
  std::vector<SkipKey> keys;
  for (const auto& each : names) {
    const auto key = each.cast<py::tuple>();
    keys.push_back({key[0].cast<Namespace>(), key[1].cast<std::string>()});
  }
  return keys;
}

std::unique_ptr<PythonLayer> make_layer(const py::tuple& layer, const std::shared_ptr<ThreadStates>& states) {
  std::vector<SkipNames> skips;
  for (const auto& each : layer[2].cast<py::list>()) {
    const auto names = each.cast<py::tuple>();
    skips.push_back({reference_to(names[0].cast<py::object>().ptr()), to_keys(names[1]), to_keys(names[2])});
  }
  return std::make_unique<PythonLayer>(layer[0].cast<std::string>(), layer[1].cast<py::object>().ptr(),
                                       std::move(skips), states);
}

void check_not_replaced(const std::vector<const PythonLayer*>& layers) {
  const Section section;
  for (const auto* layer : layers) layer->check_not_replaced();
}

/// The layers live as long as the pipeline that runs them.
RunLayers run_stage(const Reference& stage, std::vector<const PythonLayer*> layers,
                    const std::shared_ptr<ThreadStates>& states) {
  return [states, stage, layers = std::move(layers)](Value input, absl::FunctionRef<void(int)> begin, CellMemo& memo) {
    if (is_recomputing()) check_not_replaced(layers);
    const auto before = std::exchange(running, {stage.get(), &begin, &memo});
    const absl::Cleanup after = [&] { running = before; };
    begin(0);
    return call(stage.get(), std::move(input), *states);
  };
}

// May be called while an operator's error is on its way through this thread.
void lock(absl::FunctionRef<void()> call) {
  const Section section(Section::Pending::kKeep);
  call();
}

void poll() {
  const Section section;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

std::string describe(const ErrorInfo& info) {
  const char* what = info.action.kind == Kind::F ? "forward" : info.action.kind == Kind::R ? "recompute" : "backward";
  auto text = absl::StrFormat("[gpipe] in the %s of micro-batch %d on stage %d", what, info.action.micro_batch,
                              info.action.stage);
  if (info.layer >= 0) text += absl::StrFormat(", layer '%s'", info.layer_name);
  return text;
}

void add_note(PyObject* error, const ErrorInfo& info) {
  auto result = py::reinterpret_steal<py::object>(PyObject_CallMethod(error, "add_note", "s", describe(info).c_str()));
  if (!result) PyErr_Clear();  // before Python 3.11 there are no notes
}

// As pybind11 and PyTorch do at the end of a call; but in a backward, PyTorch's engine would make one type of all.
void set_error(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const c10::Error&) {
    torch::translate_exception_to_python(error);
  } catch (const std::invalid_argument& wrong) {
    py::set_error(PyExc_ValueError, wrong.what());
  } catch (const std::exception& other) {
    py::set_error(PyExc_RuntimeError, other.what());
  }
}

// What an operator raises stays with its thread, and a Section clears it.
void persist(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (python_error& raised) {
    const Call call;
    raised.persist();
  } catch (...) {
  }
}

// Has every error be one of Python's, with a note of where it is from.
void on_error(const ErrorInfo& info, const std::exception_ptr& error) {
  persist(error);
  const Section section;
  try {
    std::rethrow_exception(error);
  } catch (py::error_already_set& raised) {
    add_note(raised.value().ptr(), info);
  } catch (python_error& raised) {
    if (raised.value != nullptr) add_note(raised.value, info);
  } catch (const std::exception&) {
    set_error(error);
    py::error_already_set raised;
    add_note(raised.value().ptr(), info);
    throw raised;
  }
}

// Whether an object's constructor has come to its end.
bool is_made(PyObject* object) {
  return reinterpret_cast<py::detail::instance*>(object)->get_value_and_holder().holder_constructed();
}

}  // namespace

Checkpoint to_checkpoint(const std::string& name) {
  for (const auto mode : {Checkpoint::kNever, Checkpoint::kExceptLast, Checkpoint::kAlways}) {
    if (to_string(mode) == name) return mode;
  }
  throw std::invalid_argument("checkpoint is not one of 'always', 'except_last', or 'never', but '" + name + "'");
}

std::vector<std::unique_ptr<Layer>> make_layers(const Objects& layers, const std::shared_ptr<ThreadStates>& states) {
  std::vector<std::unique_ptr<Layer>> made;
  for (const auto& each : layers) made.push_back(make_layer(each.cast<py::tuple>(), states));
  return made;
}

PythonPipeline::PythonPipeline(const Objects& stages, const std::vector<std::string>& devices,
                               bool deferred_batch_norm) {
  std::vector<std::unique_ptr<Layer>> layers;
  std::vector<std::int64_t> balance;
  const auto states = std::make_shared<ThreadStates>();
  LanguageBinding binding{
      .lock = lock, .enter_worker = [states] { states->keep_for_this_thread(); }, .poll = poll, .on_error = on_error};
  for (const auto& each : stages) {
    const auto stage = each.cast<py::tuple>();
    const auto of_stage = py::reinterpret_borrow<Objects>(stage[1]);
    balance.push_back(static_cast<std::int64_t>(of_stage.size()));
    std::vector<const PythonLayer*> ours;
    for (auto& layer : make_layers(of_stage, states)) {
      layers_.push_back(static_cast<PythonLayer*>(layer.get()));
      ours.push_back(layers_.back());
      layers.push_back(std::move(layer));
    }
    stages_.push_back(reference_to(stage[0].cast<py::object>().ptr()));
    binding.run_layers.push_back(run_stage(stages_.back(), std::move(ours), states));
  }
  std::vector<torch::Device> placed(devices.begin(), devices.end());
  pipe_ = GPipe(std::move(layers), std::move(balance),
                GPipeOptions().devices(std::move(placed)).deferred_batch_norm(deferred_batch_norm), std::move(binding));
}

PythonPipeline::~PythonPipeline() { clear(); }

py::object PythonPipeline::forward(const py::object& input, std::int64_t chunks, const std::string& checkpoint) {
  auto value = to_value(input.ptr());
  const auto mode = to_checkpoint(checkpoint);
  for (auto* layer : layers_) {
    if (layer->refresh()) pipe_->replace_module(layer->name(), layer->module());
  }
  ++calls_;
  const absl::Cleanup called = [this] { --calls_; };
  const auto output = released([&] { return pipe_->forward(std::move(value), chunks, mode); });
  return py::reinterpret_steal<py::object>(to_python(output));
}

int PythonPipeline::traverse(absl::FunctionRef<int(PyObject*)> visit) const {
  if (calls_ > 0 || !pipe_ || !pipe_->idle()) return 0;
  for (const auto& stage : stages_) {
    if (const int result = visit(stage.get()); result != 0) return result;
  }
  for (const auto* layer : layers_) {
    if (const int result = layer->traverse(visit); result != 0) return result;
  }
  return 0;
}

void PythonPipeline::clear() {
  layers_.clear();
  stages_.clear();
  const Released released;
  pipe_ = nullptr;
}

void PythonPipeline::trace(std::optional<std::shared_ptr<Timeline>> timeline) {
  pipe_->trace(std::move(timeline).value_or(nullptr));
}

void init_pipeline(py::module_& module) {
  // A layer may refer to its pipeline, in a hook for instance. So the collector of such cycles looks through this type.
  const auto collected = py::custom_type_setup([](PyHeapTypeObject* heap_type) {
    auto& type = heap_type->ht_type;
    type.tp_flags |= Py_TPFLAGS_HAVE_GC;
    type.tp_traverse = [](PyObject* self, visitproc visit, void* arg) {
      Py_VISIT(Py_TYPE(self));
      if (!is_made(self)) return 0;
      return py::cast<PythonPipeline&>(py::handle(self)).traverse([&](PyObject* held) { return visit(held, arg); });
    };
    type.tp_clear = [](PyObject* self) {
      if (is_made(self)) py::cast<PythonPipeline&>(py::handle(self)).clear();
      return 0;
    };
  });
  module.def("begin_layer", &begin_layer, py::arg("stage"), py::arg("layer"));
  module.def("keep_for_recompute", &keep_for_recompute, py::arg("object"));
  module.def("kept_for_recompute", &kept_for_recompute);
  py::class_<PythonPipeline>(module, "Pipeline", collected)
      .def(py::init<const Objects&, const std::vector<std::string>&, bool>(), py::arg("stages"), py::arg("devices"),
           py::arg("deferred_batch_norm"))
      .def("forward", &PythonPipeline::forward, py::arg("input"), py::arg("chunks"), py::arg("checkpoint"))
      .def("trace", &PythonPipeline::trace, py::arg("timeline"));
  module.def("is_checkpointing", &is_checkpointing,
             "Whether the calling layer's forward will be recomputed. Its graph is not kept.");
  module.def("is_recomputing", &is_recomputing,
             "Whether the calling layer's forward is a recomputation, before its backward.");
}

}  // namespace gpipe::python
