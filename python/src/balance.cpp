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

}  // namespace

void init_balance(py::module_& module) {
  py::class_<LayerProfile>(module, "LayerProfile", "What one layer costs for one micro-batch: seconds and bytes.")
      .def_readonly("name", &LayerProfile::name)
      .def_readonly("forward", &LayerProfile::forward)
      .def_readonly("stored", &LayerProfile::stored)
      .def_readonly("recompute", &LayerProfile::recompute)
      .def_readonly("backward", &LayerProfile::backward)
      .def_readonly("parameters", &LayerProfile::parameters)
      .def_readonly("gradients", &LayerProfile::gradients)
      .def_readonly("optimizer", &LayerProfile::optimizer)
      .def_readonly("buffers", &LayerProfile::buffers)
      .def_readonly("output", &LayerProfile::output)
      .def_readonly("saved", &LayerProfile::saved);
  py::class_<SkipProfile>(module, "SkipProfile", "A skip, by the indices of the layers that hold its ends.")
      .def_readonly("name", &SkipProfile::name)
      .def_readonly("from_layer", &SkipProfile::from)
      .def_readonly("to_layer", &SkipProfile::to)
      .def_readonly("bytes", &SkipProfile::bytes);
  py::class_<Profile>(module, "Profile", "What a model's layers cost for micro-batches of one size.")
      .def_readonly("samples", &Profile::samples)
      .def_readonly("device", &Profile::device)
      .def_readonly("workers", &Profile::workers)
      .def_readonly("intraop_threads", &Profile::intraop_threads)
      .def_readonly("layers", &Profile::layers)
      .def_readonly("skips", &Profile::skips)
      .def(
          "balance_by_time",
          [](const Profile& profile, int partitions, int chunks, const std::string& checkpoint) {
            return balance_by_time(profile, partitions, {.chunks = chunks, .checkpoint = to_checkpoint(checkpoint)});
          },
          "The balance whose slowest stage is fastest.", py::arg("partitions"), py::arg("chunks") = 1,
          py::arg("checkpoint") = "never")
      .def(
          "balance_by_size",
          [](const Profile& profile, int partitions, int chunks, const std::string& checkpoint) {
            return balance_by_size(profile, partitions, {.chunks = chunks, .checkpoint = to_checkpoint(checkpoint)});
          },
          "The balance whose largest stage needs the fewest bytes, skips included.", py::arg("partitions"),
          py::arg("chunks") = 1, py::arg("checkpoint") = "except_last")
      .def("table", &profile_table, "For people: a row for each layer, and the sums of each stage of a balance.",
           py::arg("balance") = std::vector<std::int64_t>())
      .def("to_json", &profile_to_json)
      .def_static("from_json", &profile_from_json, py::arg("text"))
      .def("__str__", [](const Profile& profile) { return profile_table(profile); });
  py::class_<RunOptions>(module, "RunOptions")
      .def(py::init([](int chunks, const std::string& checkpoint, double bandwidth, bool copies) {
             return RunOptions{chunks, to_checkpoint(checkpoint), bandwidth, copies};
           }),
           py::arg("chunks"), py::arg("checkpoint"), py::arg("bandwidth"), py::arg("copies"));
  py::class_<Prediction>(module, "Prediction", "What a step is predicted to cost.")
      .def_readonly("balance", &Prediction::balance)
      .def_readonly("seconds", &Prediction::seconds)
      .def_readonly("bubble", &Prediction::bubble)
      .def_readonly("stages", &Prediction::stages)
      .def_readonly("bytes", &Prediction::bytes)
      .def_readonly("timeline", &Prediction::timeline)
      .def("__str__", [](const Prediction& prediction) { return prediction_table(prediction); });
  py::class_<Candidate>(module, "Candidate", "A way to run a model, and what it is predicted to cost.")
      .def_readonly("balance", &Candidate::balance)
      .def_readonly("chunks", &Candidate::chunks)
      .def_property_readonly("checkpoint", [](const Candidate& candidate) { return to_string(candidate.checkpoint); })
      .def_readonly("seconds", &Candidate::seconds)
      .def_readonly("bubble", &Candidate::bubble)
      .def_readonly("bytes", &Candidate::bytes)
      .def_readonly("fits", &Candidate::fits);
  py::class_<Suggestion>(module, "Suggestion", "The ways to run a model, the best first.")
      .def_readonly("candidates", &Suggestion::candidates)
      .def_readonly("reason", &Suggestion::reason)
      .def_property_readonly("fits", &Suggestion::fits)
      .def_property_readonly("best", &Suggestion::best)
      .def("profile_of", &Suggestion::profile_of, py::arg("candidate"), py::return_value_policy::reference_internal)
      .def("__str__", [](const Suggestion& suggestion) {
        return candidate_table(suggestion.candidates) + (suggestion.fits() ? "" : suggestion.reason + "\n");
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
