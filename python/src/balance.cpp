#include <pybind11/stl.h>

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "balance/balance.h"
#include "balance/cut.h"
#include "balance/plan_model.h"
#include "balance/predict.h"
#include "balance/report.h"
#include "python/src/pipeline.h"
#include "python/src/values.h"

namespace gpipe::python {
namespace {

namespace py = pybind11;

/// Returns a progress function that also runs signal handlers, so that Ctrl-C ends the measurement.
std::function<void(double)> progress_of(const py::object& progress) {
  return [told = progress.is_none() ? nullptr : reference_to(progress.ptr())](double part) {
    const Section section;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    if (told) py::handle(told.get())(part);
  };
}

ProfileOptions profile_options(int workers, int intraop_threads, double seconds, int repeats, double param_scale,
                               const py::object& progress) {
  auto options = ProfileOptions().workers(workers).intraop_threads(intraop_threads).seconds(seconds).repeats(repeats);
  return options.progress(progress_of(progress)).param_scale(param_scale).lends_between_devices(true);
}

/// Makes a model of layers; see make_layers().
Model to_model(const Objects& layers) {
  const auto states = std::make_shared<ThreadStates>();
  return Model([states, list = reference_to(layers.ptr())] {
    const Section section;
    return make_layers(py::reinterpret_borrow<Objects>(list.get()), states);
  });
}

RunOptions run_options(int chunks, Checkpoints checkpoint, double bandwidth, bool copies, Scheduling scheduling) {
  return {chunks, std::move(checkpoint), {.inside = {.bandwidth = bandwidth}}, copies, std::move(scheduling)};
}

auto cut_by(std::vector<std::int64_t> (*best)(const Profile&, int, const RunOptions&)) {
  return [best](const Profile& profile, const Unchecked<int>& partitions, const Unchecked<int>& chunks,
                Checkpoint checkpoint, const Unchecked<double>& bandwidth, const Unchecked<bool>& copies) {
    const auto options = run_options(checked(chunks, "chunks"), checkpoint, checked(bandwidth, "bandwidth"),
                                     checked(copies, "copies"), {});
    return best(profile, checked(partitions, "partitions"), options);
  };
}

std::string table(const Profile& profile, const Unchecked<std::vector<std::int64_t>>& balance) {
  if (balance.equal(py::list())) return profile_table(profile);
  const auto check = py::module_::import("gpipe.checks").attr("check_balance");
  return profile_table(profile, check(balance, profile.layers.size()).cast<std::vector<std::int64_t>>());
}

Profile measure(const Objects& layers, const Value& sample, const ProfileOptions& options) {
  return released([&, model = to_model(layers)] { return profile(model, sample, options); });
}

PlanOptions plan_options(std::int64_t samples, std::vector<std::string> devices, std::vector<std::int64_t> memory,
                         int replicas, int devices_per_host, double inside, double between, bool copies,
                         std::vector<int> chunks, std::vector<std::int64_t> balance,
                         std::optional<Checkpoints> checkpoint, int stages, std::vector<Scheduling> schedulings) {
  const Network network{1, devices_per_host, {.bandwidth = inside}, {.bandwidth = between}};
  return {.samples = samples,
          .devices = std::move(devices),
          .memory = std::move(memory),
          .replicas = replicas,
          .network = network,
          .copies = copies,
          .chunks = std::move(chunks),
          .balance = std::move(balance),
          .checkpoint = std::move(checkpoint),
          .stages = stages,
          .schedulings = std::move(schedulings)};
}

Plans plan_model(const Objects& layers, const Value& sample, const std::vector<torch::Device>& devices,
                 const PlanOptions& options, const std::vector<int>& chunks, int pilots,
                 const ProfileOptions& profiling) {
  const auto measuring = MeasureOptions().chunks(chunks).pilots(pilots).profile(profiling);
  return released([&, model = to_model(layers)] { return plan(model, sample, devices, options, measuring); });
}

/// The arguments of a pipeline.
py::typing::Dict<py::str, py::object> arguments(const Plan& plan) {
  using namespace py::literals;
  return py::dict("balance"_a = plan.balance, "chunks"_a = plan.chunks, "checkpoint"_a = plan.checkpoint,
                  "schedule"_a = plan.schedule, "placement"_a = plan.placement);
}

void save(const Plan& plan, const py::object& path) {
  const auto text = py::module_::import("json").attr("dumps")(arguments(plan), py::arg("indent") = 1);
  py::module_::import("pathlib").attr("Path")(path).attr("write_text")(text + py::str("\n"));
}

template <typename T>
auto from_json(T (*read)(const std::string&)) {
  return [read](const Unchecked<std::string>& text) { return read(checked(text, "text")); };
}

void init_profile(py::module_& module) {
  using L = LayerProfile;
  py::class_<L>(module, "LayerProfile", "The cost of one layer for one micro-batch, in seconds and bytes.")
      .def_readonly("name", &L::name, "The layer's name in the Sequential.")
      .def_readonly("forward", &L::forward, "Seconds of a forward that builds a graph.")
      .def_readonly("stored", &L::stored, "Seconds of a forward without a graph, in a cell that will be recomputed.")
      .def_readonly("backward", &L::backward, "Seconds of the backward.")
      .def_readonly("input_gradient", &L::input_gradient, "Seconds of a split backward's first part, of inputs.")
      .def_readonly("weight_gradient", &L::weight_gradient, "Seconds of its second part, of parameters.")
      .def_readonly("parameters", &L::parameters, "Bytes of the parameters.")
      .def_readonly("gradients", &L::gradients, "Bytes of the parameters' gradients.")
      .def_readonly("optimizer", &L::optimizer, "Bytes of the optimizer's state.")
      .def_readonly("buffers", &L::buffers, "Bytes of the buffers.")
      .def_readonly("output", &L::output, "Bytes of the output.")
      .def_readonly("saved", &L::saved, "Bytes that the forward allocates and the backward needs.");
  py::class_<SkipProfile>(module, "SkipProfile", "The cost of one skip connection for one micro-batch.")
      .def_readonly("name", &SkipProfile::name, "The name that the layers stash and read.")
      .def_readonly("from_layer", &SkipProfile::from, "Index of the layer that stashes.")
      .def_readonly("reader_layers", &SkipProfile::readers, "Indices of the layers that read it.")
      .def_readonly("bytes", &SkipProfile::bytes, "Bytes of the stashed tensor.");
  py::class_<TieProfile>(module, "TieProfile", "A parameter that several layers share.")
      .def_readonly("name", &TieProfile::name, "Its name in the first layer.")
      .def_readonly("layers", &TieProfile::layers, "Indices of the layers.")
      .def_readonly("bytes", &TieProfile::bytes, "Bytes of the parameter.");
  py::class_<Profile>(module, "Profile", "The cost of a model's layers for micro-batches of one size.")
      .def_readonly("samples", &Profile::samples, "Samples in a micro-batch.")
      .def_readonly("device", &Profile::device, "The device of the measurement.")
      .def_readonly("workers", &Profile::workers, "Number of stages that ran at once during the measurement.")
      .def_readonly("intraop_threads", &Profile::intraop_threads, "Threads that one operator could use.")
      .def_readonly("layers", &Profile::layers, "The layers, in order.")
      .def_readonly("skips", &Profile::skips, "The skip connections.")
      .def_readonly("ties", &Profile::ties, "The parameters that several layers share.")
      .def("balance_by_time", cut_by(&balance_by_time), "Returns the balance whose slowest stage is fastest.",
           py::arg("partitions"), py::arg("chunks") = 1, py::arg("checkpoint") = Checkpoint::kNever,
           py::arg("bandwidth") = 0.0, py::arg("copies") = false)
      .def("balance_by_size", cut_by(&balance_by_size),
           "Returns the balance whose largest stage needs the fewest bytes, skip connections included.",
           py::arg("partitions"), py::arg("chunks") = 1, py::arg("checkpoint") = Checkpoint::kExceptLast,
           py::arg("bandwidth") = 0.0, py::arg("copies") = false)
      .def("cut_bytes", &cut_bytes,
           "Returns the bytes that a cut after each layer sends forward per micro-batch: activation, skips, lent "
           "parameters. None where the model cannot be cut, and after the last layer.")
      .def("table", &table, "Returns a table: a row per layer and, for a balance, its cuts and the sums per stage.",
           py::arg("balance") = std::vector<std::int64_t>())
      .def("to_json", &profile_to_json, "Returns the profile as JSON text.")
      .def_static("from_json", from_json(&profile_from_json), py::arg("text"),
                  "Reads the text that to_json() returns. Raises ValueError, with the place and the fault.")
      .def("__str__", [](const Profile& profile) { return profile_table(profile); });
}

void init_plans(py::module_& module) {
  py::class_<Prediction>(module, "Prediction", "The predicted cost of a training step.")
      .def_readonly("balance", &Prediction::balance, "The balance of the pipeline.")
      .def_readonly("seconds", &Prediction::seconds, "Seconds per step.")
      .def_readonly("bubble", &Prediction::bubble, "Idle time as a share of the workers' total time, from 0 to 1.")
      .def_readonly("stages", &Prediction::stages, "Seconds per stage for one micro-batch, from forward to backward.")
      .def_readonly("bytes", &Prediction::bytes,
                    "Peak bytes per worker, of parameters, gradients, optimizer state, buffers and activations.")
      .def_readonly("placement", &Prediction::placement, "The worker of each stage.")
      .def_readonly("timeline", &Prediction::timeline, "The simulated step, without the bytes held between steps.")
      .def("__str__", [](const Prediction& prediction) { return prediction_table(prediction); });
  py::class_<Plan>(module, "Plan", "A way to train a model, with its predicted cost.")
      .def_readonly("balance", &Plan::balance, "Number of layers of each stage.")
      .def_readonly("chunks", &Plan::chunks, "Number of micro-batches per mini-batch.")
      .def_readonly("checkpoint", &Plan::checkpoint, "The checkpoint mode, or a list with that of each stage.")
      .def_readonly("schedule", &Plan::schedule, "The schedule.")
      .def_readonly("placement", &Plan::placement, "The worker of each stage.")
      .def_readonly("seconds", &Plan::seconds, "Predicted seconds per step, the forward and backward of a mini-batch.")
      .def_readonly("measured", &Plan::measured, "Measured seconds per step; 0 if none was run.")
      .def_readonly("bubble", &Plan::bubble, "Idle time as a share of the workers' total time, from 0 to 1.")
      .def_readonly("bytes", &Plan::bytes, "Peak bytes per worker.")
      .def_property_readonly("fits", &Plan::fits, "Whether every device stays within its memory.")
      .def_readonly("crossing", &Plan::crossing, "Bytes that the forward of a mini-batch sends to other workers.")
      .def_readonly("replicas", &Plan::replicas, "Number of pipelines; chunks and bytes are of one of them.")
      .def_readonly("reduction", &Plan::reduction,
                    "The part of the seconds after the last backward, until the replicas have summed all gradients.")
      .def_property_readonly("arguments", &arguments, "A dict of arguments for ``GPipe(model, **plan.arguments)``.")
      .def("save", &save, "Writes the arguments as JSON to a file, which from_module(plan=file) reads.",
           py::arg("path"));
  py::class_<Plans>(module, "Plans", "Ways to train a model, one per schedule and number of micro-batches.")
      .def_readonly("plans", &Plans::plans, "The plans. The best one that fits is first.")
      .def_readonly("unpartitioned", &Plans::unpartitioned,
                    "The whole mini-batch on one device, without a pipeline; None if it was not measured.")
      .def_readonly("reason", &Plans::reason, "Why no plan fits. Empty if one does.")
      .def_readonly("least_seconds", &Plans::least_seconds, "No plan is predicted to take fewer seconds per step.")
      .def_readonly("more_memory_saves", &Plans::more_memory_saves,
                    "Predicted seconds that 5 % more memory on each device would save in a step of the best plan.")
      .def_property_readonly("fits", &Plans::fits, "Whether any plan fits.")
      .def_property_readonly("best", &Plans::best, "The first. Raises RuntimeError, with the reason, if none fits.")
      .def("__str__", [](const Plans& plans) { return plan_table(plans); });
}

}  // namespace

void init_balance(py::module_& module) {
  init_profile(module);
  py::class_<Scheduling>(module, "Scheduling")
      .def(py::init([](std::string schedule, std::vector<int> placement) {
        return Scheduling{std::move(schedule), 1, std::move(placement)};
      }))
      .def_readonly("schedule", &Scheduling::schedule)
      .def_readonly("placement", &Scheduling::placement);
  py::class_<PlanOptions>(module, "PlanOptions").def(py::init(&plan_options));
  py::class_<RunOptions>(module, "RunOptions").def(py::init(&run_options));
  py::class_<ProfileOptions>(module, "ProfileOptions").def(py::init(&profile_options));
  init_plans(module);
  module.def("profile", &measure);
  module.def("plan_model", &plan_model);
  module.def("plan_profiles", [](const std::vector<Profile>& profiles, const PlanOptions& options) {
    return released([&] { return plan(profiles, options); });
  });
  module.def("predict",
             py::overload_cast<const Profile&, const std::vector<std::int64_t>&, const RunOptions&>(&predict));
  module.def("plan_table", &plan_table, py::arg("plans"), py::arg("rows") = std::numeric_limits<int>::max());
  module.def("check_stages", &check_stages);
}

}  // namespace gpipe::python
