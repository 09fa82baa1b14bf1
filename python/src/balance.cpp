#include <pybind11/stl.h>

#include <utility>

#include "balance/balance.h"
#include "balance/predict.h"
#include "balance/report.h"
#include "balance/search.h"
#include "balance/suggest.h"
#include "python/src/pipeline.h"
#include "python/src/values.h"

namespace gpipe::python {
namespace {

namespace py = pybind11;

/// How to measure; looks for signals now and then, so that Ctrl-C ends it.
ProfileOptions profile_options(int workers, int intraop_threads, double seconds, int repeats, double param_scale,
                               const py::object& progress) {
  auto options = ProfileOptions()
                     .workers(workers)
                     .intraop_threads(intraop_threads)
                     .seconds(seconds)
                     .repeats(repeats)
                     .param_scale(param_scale);
  options.progress([told = progress.is_none() ? nullptr : reference_to(progress.ptr())](double part) {
    const Section section;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    if (told) py::reinterpret_borrow<py::object>(told.get())(part);
  });
  return options;
}

/// Layers as PythonPipeline takes them, of one stage.
Model to_model(const Objects& layers) {
  const auto states = std::make_shared<ThreadStates>();
  return Model([states, list = reference_to(layers.ptr())] {
    const Section section;
    return make_layers(py::reinterpret_borrow<Objects>(list.get()), states);
  });
}

std::vector<torch::Device> to_devices(const std::vector<std::string>& names) { return {names.begin(), names.end()}; }

RunOptions run_options(int chunks, const std::string& checkpoint, double bandwidth, bool copies) {
  return {chunks, to_checkpoint(checkpoint), bandwidth, copies};
}

auto cut_by(std::vector<std::int64_t> (*best)(const Profile&, int, const RunOptions&)) {
  return [best](const Profile& profile, int partitions, int chunks, const std::string& checkpoint, double bandwidth,
                bool copies) { return best(profile, partitions, run_options(chunks, checkpoint, bandwidth, copies)); };
}

}  // namespace

void init_balance(py::module_& module) {
  py::class_<LayerProfile>(module, "LayerProfile", "What one layer costs for one micro-batch: seconds and bytes.")
      .def_readonly("name", &LayerProfile::name, "As the Sequential names it.")
      .def_readonly("forward", &LayerProfile::forward, "Seconds of a forward that builds its graph.")
      .def_readonly("stored", &LayerProfile::stored,
                    "Seconds of a forward without a graph, in a cell that will be recomputed.")
      .def_readonly("recompute", &LayerProfile::recompute, "Seconds of the forward again, which builds the graph.")
      .def_readonly("backward", &LayerProfile::backward, "Seconds of its backward.")
      .def_readonly("parameters", &LayerProfile::parameters, "Bytes of its parameters.")
      .def_readonly("gradients", &LayerProfile::gradients, "Bytes of the gradients of parameters that require one.")
      .def_readonly("optimizer", &LayerProfile::optimizer, "Bytes that the optimizer keeps of them.")
      .def_readonly("buffers", &LayerProfile::buffers, "Bytes of its buffers.")
      .def_readonly("output", &LayerProfile::output, "Bytes that it passes on to the next layer.")
      .def_readonly("saved", &LayerProfile::saved, "Bytes that it allocates in its forward and a backward will need.");
  py::class_<SkipProfile>(module, "SkipProfile", "A skip, by the indices of the layers that hold its ends.")
      .def_readonly("name", &SkipProfile::name, "As the layers name it.")
      .def_readonly("from_layer", &SkipProfile::from, "The index of the layer that stashes it.")
      .def_readonly("to_layer", &SkipProfile::to, "The index of the layer that pops it.")
      .def_readonly("bytes", &SkipProfile::bytes, "Its bytes, for one micro-batch.");
  py::class_<Profile>(module, "Profile", "What a model's layers cost for micro-batches of one size.")
      .def_readonly("samples", &Profile::samples, "Samples in a micro-batch.")
      .def_readonly("device", &Profile::device, "Where it was measured.")
      .def_readonly("workers", &Profile::workers, "How many stages ran at once while it was measured.")
      .def_readonly("intraop_threads", &Profile::intraop_threads, "Threads that one operator could use.")
      .def_readonly("layers", &Profile::layers, "The layers, in order.")
      .def_readonly("skips", &Profile::skips, "The skips.")
      .def("balance_by_time", cut_by(&balance_by_time), "The balance whose slowest stage is fastest.",
           py::arg("partitions"), py::arg("chunks") = 1, py::arg("checkpoint") = "never", py::arg("bandwidth") = 0.0,
           py::arg("copies") = false)
      .def("balance_by_size", cut_by(&balance_by_size),
           "The balance whose largest stage needs the fewest bytes, skips included.", py::arg("partitions"),
           py::arg("chunks") = 1, py::arg("checkpoint") = "except_last", py::arg("bandwidth") = 0.0,
           py::arg("copies") = false)
      .def("table", &profile_table, "For people: a row for each layer, and the sums of each stage of a balance.",
           py::arg("balance") = std::vector<std::int64_t>())
      .def("to_json", &profile_to_json, "For people and for files.")
      .def_static("from_json", &profile_from_json,
                  "What to_json() made. Raises ValueError, which says what is wrong and where.", py::arg("text"))
      .def("__str__", [](const Profile& profile) { return profile_table(profile); });
  py::class_<RunOptions>(module, "RunOptions")
      .def(py::init(&run_options), py::arg("chunks"), py::arg("checkpoint"), py::arg("bandwidth"), py::arg("copies"));
  py::class_<Prediction>(module, "Prediction", "What a step is predicted to cost.")
      .def_readonly("balance", &Prediction::balance, "Of which it is.")
      .def_readonly("seconds", &Prediction::seconds, "Of a step.")
      .def_readonly("bubble", &Prediction::bubble, "Idle time over the time of all workers, from 0 to 1.")
      .def_readonly("stages", &Prediction::stages,
                    "Seconds of each stage's actions for one micro-batch, forward to backward.")
      .def_readonly(
          "bytes", &Prediction::bytes,
          "Most in use at once on each stage, of parameters, gradients, optimizer's state, buffers and activations.")
      .def_readonly("timeline", &Prediction::timeline,
                    "What was simulated; its bytes are those above what is always there.")
      .def("__str__", [](const Prediction& prediction) { return prediction_table(prediction); });
  py::class_<Candidate>(module, "Candidate", "A way to run a model, and what it is predicted to cost.")
      .def_readonly("balance", &Candidate::balance, "How many layers each stage has.")
      .def_readonly("chunks", &Candidate::chunks, "Micro-batches of a mini-batch.")
      .def_property_readonly(
          "checkpoint", [](const Candidate& candidate) { return to_string(candidate.checkpoint); },
          "The checkpoint mode.")
      .def_readonly("seconds", &Candidate::seconds, "Of a step, forward and backward of the mini-batch.")
      .def_readonly("bubble", &Candidate::bubble, "Idle time over the time of all workers, from 0 to 1.")
      .def_readonly("bytes", &Candidate::bytes, "Most in use at once, of each stage.")
      .def_readonly("fits", &Candidate::fits, "Whether that is within the limit.");
  py::class_<Suggestion>(module, "Suggestion", "The ways to run a model, the best first.")
      .def_readonly("candidates", &Suggestion::candidates,
                    "One for each number of chunks and checkpoint mode; the fastest that fits comes first.")
      .def_readonly("reason", &Suggestion::reason, "Why nothing fits; empty when something does.")
      .def_readonly("unpartitioned", &Suggestion::unpartitioned,
                    "The whole mini-batch on one device, without a pipeline; None if the model does not run that way.")
      .def_property_readonly("fits", &Suggestion::fits, "Whether any candidate does.")
      .def_property_readonly("best", &Suggestion::best,
                             "The first candidate. Raises RuntimeError, with the reason, when nothing fits.")
      .def("profile_of", &Suggestion::profile_of, "The profile that one of the candidates was made from.",
           py::arg("candidate"), py::return_value_policy::reference_internal)
      .def("__str__", [](const Suggestion& suggestion) {
        return candidate_table(suggestion.candidates, suggestion.unpartitioned) +
               (suggestion.fits() ? "" : suggestion.reason + "\n");
      });

  py::class_<ProfileOptions>(module, "ProfileOptions")
      .def(py::init(&profile_options), py::arg("workers"), py::arg("intraop_threads"), py::arg("seconds"),
           py::arg("repeats"), py::arg("param_scale"), py::arg("progress"));
  module.def("profile", [](const Objects& layers, const py::object& sample, const ProfileOptions& options) {
    const auto model = to_model(layers);
    const auto value = to_value(sample.ptr());
    return released([&] { return profile(model, value, options); });
  });
  module.def("predict", &predict);
  module.def("suggest", [](const Objects& layers, const py::object& sample, const std::vector<std::string>& devices,
                           const std::vector<int>& chunks, const std::vector<std::string>& checkpoints,
                           std::int64_t memory_limit, double bandwidth, const ProfileOptions& profiling) {
    const auto model = to_model(layers);
    const auto value = to_value(sample.ptr());
    std::vector<Checkpoint> modes;
    for (const auto& name : checkpoints) modes.push_back(to_checkpoint(name));
    const auto options = SuggestOptions()
                             .chunks(chunks)
                             .checkpoints(modes)
                             .memory_limit(memory_limit)
                             .bandwidth(bandwidth)
                             .profile(profiling);
    return released([&] { return suggest(model, value, to_devices(devices), options); });
  });
}

}  // namespace gpipe::python
