#include "python/src/pipeline.h"

#include <c10/util/Exception.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>

#include <algorithm>
#include <atomic>
#include <optional>
#include <tuple>
#include <utility>

#include "gpipe/binding.h"
#include "gpipe/gradients.h"
#include "gpipe/ranks.h"
#include "gpipe/run/loss_check.h"
#include "gpipe/timeline.h"
#include "python/src/values.h"

namespace gpipe::python {
namespace {

namespace py = pybind11;

/// The cell that this thread runs.
struct Running {
  PyObject* stage = nullptr;
  const std::function<void(int)>* begin_layer = nullptr;
  CellMemo* memo = nullptr;
  const std::vector<Borrowed>* borrowed = nullptr;
};
thread_local Running running;

/// What a cell's forward leaves for its recompute.
struct Memo {
  Reference object;                                         ///< of the Python module
  std::vector<std::shared_ptr<const Graph::State>> states;  ///< of layers that run without Python
};

/// Called by a stage's module before each of its layers. The stage itself has begun the first layer.
void begin_layer(const py::handle& stage, int layer) {
  if (layer > 0 && running.stage == stage.ptr()) (*running.begin_layer)(layer);
}

/// Returns a tuple (parameter, stand-in) for each parameter that the stage borrows from another device.
std::vector<std::pair<at::Tensor, at::Tensor>> borrowed(const py::handle& stage) {
  std::vector<std::pair<at::Tensor, at::Tensor>> result;
  if (running.stage != stage.ptr()) return result;
  for (const auto& [parameter, stand_in] : *running.borrowed) {
    if (parameter.device() != stand_in.device()) result.emplace_back(parameter, stand_in);
  }
  return result;
}

/// Saves an object from a cell's forward for its recompute.
void save_for_recompute(const py::object& object) {
  if (running.memo != nullptr) *running.memo = std::make_shared<Memo>(Memo{reference_to(object.ptr()), {}});
}

/// The object that the cell's forward saved, or None.
py::object saved_for_recompute() {
  if (running.memo == nullptr || *running.memo == nullptr) return py::none();
  return py::reinterpret_borrow<py::object>(static_cast<Memo*>(running.memo->get())->object.get());
}

/// Runs a stage's layers without Python. A recompute finds the tensors and modes of its forward.
Value run_native(const std::vector<const PythonLayer*>& layers, Value value,
                 const std::function<void(int)>& begin_layer, CellMemo& memo, const std::vector<Borrowed>& borrowed) {
  auto kept = std::static_pointer_cast<Memo>(memo);
  if (!kept) {
    kept = std::make_shared<Memo>();
    for (const auto* layer : layers) kept->states.push_back(layer->native()->state());
    if (is_checkpointing()) memo = kept;
  }
  for (std::size_t i = 0; i < layers.size(); ++i) {
    begin_layer(static_cast<int>(i));
    value = layers[i]->native()->run(std::move(value), *kept->states[i], borrowed);
  }
  return value;
}

/// Runs a stage's layers by calling its Python module, or without Python if `is_native` says so; a recompute as its
/// forward. The pipeline that calls the result owns `layers`.
RunLayers run_stage(const Reference& stage, std::vector<const PythonLayer*> layers,
                    const std::shared_ptr<ThreadStates>& states, std::shared_ptr<const std::atomic<bool>> is_native) {
  return [states, stage, layers = std::move(layers), is_native = std::move(is_native)](
             Value input, const std::function<void(int)>& begin_layer, CellMemo& memo,
             const std::vector<Borrowed>& borrowed) {
    const auto* kept = static_cast<Memo*>(memo.get());
    const bool was_native = kept != nullptr && !kept->states.empty();
    if (is_recomputing() ? was_native : is_native->load()) {
      return run_native(layers, std::move(input), begin_layer, memo, borrowed);
    }
    if (is_recomputing()) {
      const Section section;
      for (const auto* layer : layers) layer->check_not_replaced();
    }
    const auto outer = std::exchange(running, {stage.get(), &begin_layer, &memo, &borrowed});
    const absl::Cleanup restore = [&] { running = outer; };
    begin_layer(0);
    return call(stage.get(), {std::move(input)}, *states);
  };
}

/// Calls a function with the interpreter's lock. An operator's error may be set on this thread meanwhile.
void lock(const std::function<void()>& call) {
  const Section section(Section::Pending::kRestore);
  call();
}

/// Whether an object's constructor has finished.
bool is_made(PyObject* object) {
  return reinterpret_cast<py::detail::instance*>(object)->get_value_and_holder().holder_constructed();
}

}  // namespace

void poll() {
  const Section section;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

std::vector<std::unique_ptr<Layer>> make_layers(const Objects& layers, const std::shared_ptr<ThreadStates>& states) {
  using Keys = std::vector<SkipKey>;
  using Skips = std::vector<std::tuple<py::object, Keys, Keys, Keys>>;
  std::vector<std::unique_ptr<Layer>> result;
  for (const auto& each : layers) {
    const auto [name, module, skips] = each.cast<std::tuple<std::string, py::object, Skips>>();
    std::vector<SkipNames> names;
    for (const auto& [skippable, stashes, pops, peeks] : skips) {
      names.push_back({reference_to(skippable.ptr()), stashes, pops, peeks});
    }
    result.push_back(std::make_unique<PythonLayer>(name, module.ptr(), std::move(names), states));
  }
  return result;
}

PythonPipeline::PythonPipeline(const Objects& stages, GPipeOptions options, std::vector<std::size_t> parameter_places) {
  std::vector<std::unique_ptr<Layer>> layers;
  std::vector<std::int64_t> balance;
  std::vector<OwnStage> all;
  LanguageBinding binding{.lock = lock,
                          .enter_worker =
                              [states = states_] {
                                states->create_for_this_thread();
                                copy_backward_context();
                              },
                          .poll = poll,
                          .on_error = on_error,
                          .parameter_places = std::move(parameter_places),
                          .structures = {encode_structure, decode_structure}};
  for (const auto& each : stages) {
    const auto stage = each.cast<py::tuple>();
    const auto stage_layers = py::reinterpret_borrow<Objects>(stage[1]);
    balance.push_back(static_cast<std::int64_t>(stage_layers.size()));
    auto& made = all.emplace_back();
    made.module = reference_to(stage[0].cast<py::object>().ptr());
    for (auto& layer : make_layers(stage_layers, states_)) {
      made.layers.push_back(static_cast<PythonLayer*>(layer.get()));
      layers.push_back(std::move(layer));
    }
    binding.run_layers.push_back(
        run_stage(made.module, {made.layers.begin(), made.layers.end()}, states_, made.is_native));
  }
  // Over ranks, this waits for the others.
  pipe_ =
      released([&] { return GPipe(std::move(layers), std::move(balance), std::move(options), std::move(binding)); });
  for (std::size_t s = 0; s < all.size(); ++s) {
    if (pipe_->is_here(static_cast<int>(s))) stages_.push_back(std::move(all[s]));
  }
}

PythonPipeline::~PythonPipeline() { clear(); }

bool PythonPipeline::refresh() {
  bool replaced = false;
  for (const auto& stage : stages_) {
    for (auto* layer : stage.layers) {
      if (!layer->refresh()) continue;
      pipe_->replace_module(registered_name(layer->name()), layer->module());
      replaced = true;
    }
  }
  return !replaced || pipe_->ties_unchanged();
}

void PythonPipeline::prepare(const Value& input, bool training) {
  if (pipe_->is_training() != training) pipe_->train(training);
  // Tensors of other classes need Python, also those that layers make of them.
  const bool has_other_class = pipe_->is_here(0) && input.form().kind == Value::Form::kObject;
  const bool all = calls_are_plain() && !has_other_class;
  for (const auto& stage : stages_) {
    stage.is_native->store(all && is_plain(stage.module.get()) &&
                           std::all_of(stage.layers.begin(), stage.layers.end(),
                                       [](PythonLayer* layer) { return layer->prepare_native(); }));
  }
}

Value PythonPipeline::forward(const py::object& input, std::int64_t chunks, const Checkpoints& checkpoints,
                              bool training) {
  auto value = convert([&] { return to_value(input); });
  prepare(value, training);
  return run([&](GPipeImpl& pipe) { return pipe.forward(std::move(value), chunks, checkpoints); });
}

Pair PythonPipeline::train(const py::object& input, const py::object& target, const py::object& loss,
                           const std::optional<NativeLoss>& native, std::shared_ptr<LossRecord> record,
                           const py::object& hold_state, const StepOptions& options, bool training, bool keeps_graph) {
  auto value = convert([&] { return to_value(input); });
  auto wanted = convert([&] { return to_value(target); });
  prepare(value, training);
  auto function = to_loss(loss, calls_are_plain() ? native : std::nullopt, states_);
  function.record = std::move(record);
  function.hold_state = [hold = reference_to(hold_state.ptr())]() -> std::function<void()> {
    const Section section;
    return [put_back = reference_to(py::handle(hold.get())().ptr())] {
      const Section section;
      py::handle(put_back.get())();
    };
  };
  const auto result = run([&](GPipeImpl& pipe) {
    if (keeps_graph) return StepResult{pipe.compute_loss(std::move(value), std::move(wanted), function, options), {}};
    return pipe.step(std::move(value), std::move(wanted), function, options);
  });
  return py::make_tuple(result.loss, options.return_output() ? to_python(result.output) : py::none());
}

void PythonPipeline::withdraw(const std::string& reason) {
  run([&](GPipeImpl& pipe) { pipe.team().withdraw(reason); });
}

int PythonPipeline::traverse(absl::FunctionRef<int(PyObject*)> visit) const {
  if (calls_ > 0 || !pipe_ || !pipe_->idle()) return 0;
  for (const auto& stage : stages_) {
    if (const int result = visit(stage.module.get()); result != 0) return result;
    for (const auto* layer : stage.layers) {
      if (const int result = layer->traverse(visit); result != 0) return result;
    }
  }
  return 0;
}

void PythonPipeline::clear() {
  stages_.clear();
  const Released released;
  pipe_ = nullptr;
}

namespace {

std::vector<py::bytes> gather(PythonPipeline& pipeline, const py::bytes& bytes, const std::string& what) {
  const auto gathered =
      pipeline.run([&, own = std::string(bytes)](GPipeImpl& pipe) { return pipe.team().gather(own, what); });
  return {gathered.begin(), gathered.end()};
}

py::bytes share(PythonPipeline& pipeline, const py::bytes& bytes) {
  return pipeline.run([own = std::string(bytes)](GPipeImpl& pipe) { return pipe.team().share(own); });
}

/// A call over ranks that trains nothing.
template <typename Result, typename Argument>
auto call_of(Result (TeamCalls::*method)(Argument)) {
  return [method](PythonPipeline& pipeline, Argument argument) {
    return pipeline.run([&](GPipeImpl& pipe) { return (pipe.team().*method)(std::move(argument)); });
  };
}

void init_pipeline(py::module_& module) {
  // A layer may refer to its pipeline, for example in a hook. The garbage collector needs this to find such cycles.
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
  module.def("begin_layer", &begin_layer);
  module.def("borrowed", &borrowed);
  module.def("save_for_recompute", &save_for_recompute);
  module.def("saved_for_recompute", &saved_for_recompute);
  py::class_<PythonPipeline>(module, "Pipeline", collected)
      .def(py::init([](const Objects& stages, const std::string& schedule, const std::vector<torch::Device>& devices,
                       std::vector<int> placement, bool deferred_batch_norm, bool keep_memory,
                       std::optional<std::shared_ptr<Ranks>> ranks, std::vector<std::size_t> parameter_places) {
        auto options = GPipeOptions().schedule(schedule).placement(std::move(placement));
        options.devices(devices).deferred_batch_norm(deferred_batch_norm).keep_memory(keep_memory);
        options.ranks(std::move(ranks).value_or(nullptr));
        return std::make_unique<PythonPipeline>(stages, std::move(options), std::move(parameter_places));
      }))
      .def_property_readonly("busy", &PythonPipeline::busy)
      .def("refresh", &PythonPipeline::refresh)
      .def("forward", &PythonPipeline::forward)
      .def("train", &PythonPipeline::train)
      .def("gather", &gather)
      .def("share", &share)
      .def("gather_timeline", call_of<Timeline, Timeline>(&TeamCalls::gather))
      .def("largest", call_of(&TeamCalls::largest))
      .def("sum_over_replicas", call_of(&TeamCalls::sum_over_replicas))
      .def("clip_grad_norm_",
           [](PythonPipeline& pipeline, double max_norm, double norm_type, bool error_if_nonfinite) {
             return pipeline.run(
                 [&](GPipeImpl& pipe) { return clip_grad_norm_(pipe, max_norm, norm_type, error_if_nonfinite); });
           })
      .def("withdraw", &PythonPipeline::withdraw)
      .def("note_load",
           [](PythonPipeline& pipeline) { pipeline.run([](GPipeImpl& pipe) { pipe.team().note_load(); }); })
      .def("schedule",
           [](PythonPipeline& pipeline) { return pipeline.run([](GPipeImpl& pipe) { return pipe.schedule(); }); })
      .def("trace", [](PythonPipeline& pipeline, const std::optional<std::shared_ptr<Timeline>>& timeline) {
        pipeline.run([&](GPipeImpl& pipe) { pipe.trace(timeline.value_or(nullptr)); });
      });
  module.def("is_checkpointing", &is_checkpointing,
             "Returns whether the calling layer's forward will be recomputed. The graph of this forward is not kept.");
  module.def("is_recomputing", &is_recomputing,
             "Returns whether the calling layer's forward is a recompute, which precedes the cell's backward.");
}

}  // namespace
}  // namespace gpipe::python

PYBIND11_MODULE(_C, module) {
  namespace py = pybind11;
  using namespace gpipe::python;

  py::register_local_exception_translator([](std::exception_ptr error) {
    try {
      if (error) std::rethrow_exception(error);
    } catch (const c10::Error&) {
      torch::translate_exception_to_python(error);
    } catch (python_error& raised) {
      raised.restore();
    }
  });
  init_training(module);
  init_schedule(module);
  init_graph(module);
  init_pipeline(module);
  init_snapshot(module);
  init_balance(module);
  reset_calls_after_fork();
  py::module_::import("atexit").attr("register")(py::cpp_function(&await_calls_at_exit));
}
