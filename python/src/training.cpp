// What a training calls besides its pipeline: ranks, losses, skips, and random numbers.

#include <c10/core/impl/VirtualGuardImpl.h>
#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "gpipe/autograd/random_scope.h"
#include "gpipe/loss.h"
#include "gpipe/ranks.h"
#include "gpipe/run/loss_check.h"
#include "python/src/pipeline.h"
#include "python/src/values.h"
#include "skip/layout.h"
#include "skip/skippable.h"

namespace gpipe::python {
namespace {

namespace py = pybind11;

/// Joins the processes of a group, or those that the environment describes if it is None. Time-outs are in seconds.
std::shared_ptr<Ranks> make_ranks(const c10d::ProcessGroup* group, double timeout, double join_timeout,
                                  const std::string& interface, int replicas, bool share_outputs,
                                  const py::object& join_devices) {
  const auto milliseconds = [](double seconds) {
    return std::chrono::ceil<std::chrono::milliseconds>(std::chrono::duration<double>(seconds));
  };
  auto options = RanksOptions().timeout(milliseconds(timeout)).join_timeout(milliseconds(join_timeout));
  options.interface(interface).replicas(replicas).share_outputs(share_outputs);
  JoinDevices join;
  if (!join_devices.is_none()) {
    join = [function = reference_to(join_devices.ptr())](const std::string& name, int rank, int size) {
      const Section section;
      const auto made = py::handle(function.get())(name, rank, size);
      return c10::intrusive_ptr<c10d::Backend>::reclaim_copy(made.cast<c10d::Backend*>());
    };
  }
  return released([&] {
    if (group == nullptr) return Ranks::from_environment(options, poll);
    return std::make_shared<Ranks>(group->getStore(), group->getRank(), group->getSize(), options, join, poll);
  });
}

std::optional<Reduction> to_reduction(const py::object& name) {
  if (name.is_none()) return std::nullopt;
  if (name.equal(py::str("mean"))) return Reduction::kMean;
  if (name.equal(py::str("sum"))) return Reduction::kSum;
  throw std::invalid_argument("[gpipe] reduction must be 'mean' or 'sum', but is " +
                              py::repr(name).cast<std::string>());
}

/// Makes a StepOptions::count of a Python callable that returns a float or a tensor, or of the weight and the ignored
/// index of a loss of classes.
CountFunction to_count(const py::object& callable) {
  if (py::isinstance<py::tuple>(callable)) {
    const auto [weight, ignored] = callable.cast<std::pair<std::optional<at::Tensor>, std::int64_t>>();
    return [of_classes = count_of_classes(weight.value_or(at::Tensor()), ignored)](const Value& target) -> Count {
      const auto& tensors = target.tensors();  // of several, the loss raises an error
      return tensors.size() == 1 ? of_classes(tensors.front()) : static_cast<double>(tensors.size());
    };
  }
  return [function = reference_to(callable.ptr())](const Value& target) -> Count {
    const Section section;
    const auto count = py::handle(function.get())(target);
    return py::isinstance<py::float_>(count) ? Count(count.cast<double>()) : count.cast<at::Tensor>();
  };
}

StepOptions make_options(const std::optional<py::object>& count, const py::object& reduction, double scale,
                         bool return_output, std::int64_t chunks, const Checkpoints& checkpoints, bool check) {
  auto options = StepOptions().reduction(to_reduction(reduction)).scale(scale).return_output(return_output);
  if (count) options.count(to_count(*count));
  return options.chunks(chunks).checkpoint(checkpoints).check(check);
}

std::pair<double, double> compare_losses(const py::object& loss, const Value& output, const Value& target,
                                         const StepOptions& options) {
  const auto function = to_loss(loss, std::nullopt, std::make_shared<ThreadStates>());
  const auto check = released([&] { return check_loss(function, output, target, options.chunks(), options); });
  return {check.whole, check.from_micro_batches};
}

/// Each declaration is a tuple (index of the layer, path of the module, stashes, pops, peeks). Errors: as
/// match_skips().
void check_skips(
    const std::vector<std::tuple<int, std::string, std::vector<SkipKey>, std::vector<SkipKey>, std::vector<SkipKey>>>&
        declarations) {
  std::vector<SkipDeclaration> declared;
  for (const auto& [layer, path, stashes, pops, peeks] : declarations) {
    declared.push_back({layer, path, stashes, pops, peeks});
  }
  match_skips(declared);
}

/// The generator that replaces a device's default generator in the calling thread's scope. None outside a scope.
std::optional<at::Generator> scope_generator(const std::string& device) {
  auto* scope = RandomScope::current();
  if (scope == nullptr) return std::nullopt;
  torch::Device place(device);
  if (!place.is_cpu() && !place.has_index()) place = c10::impl::VirtualGuardImpl(place.type()).getDevice();
  return scope->generator(place);
}

}  // namespace

LossFunction to_loss(const py::object& callable, const std::optional<NativeLoss>& native,
                     std::shared_ptr<ThreadStates> states) {
  return [function = reference_to(callable.ptr()), native, states = std::move(states)](const Value& output,
                                                                                       const Value& target) {
    const auto is_tensor = [](const Value& value) { return value.form().kind == Value::Form::kTensor; };
    if (native && is_tensor(output) && is_tensor(target)) {
      const auto& [graph, tensors, one_shape] = *native;
      const std::vector<at::Tensor> inputs{output.tensor(), target.tensor()};
      // The function of torch warns of other shapes, or refuses them.
      if (!one_shape || inputs[0].sizes() == inputs[1].sizes()) return graph->run(inputs, {tensors}).front();
    }
    // A tensor of any class, as loss_tensor() in losses.py has made sure.
    return call(function.get(), {output, target}, *states).tensors().front();
  };
}

void init_training(py::module_& module) {
  // gpipe.ranks keeps each until finish() has been called, so no destructor waits for other ranks.
  py::class_<Ranks, std::shared_ptr<Ranks>>(module, "Ranks")
      .def(py::init(&make_ranks))
      .def_property_readonly("rank", &Ranks::rank)
      .def_property_readonly("size", &Ranks::size)
      .def_property_readonly("replica", &Ranks::replica)
      .def_property_readonly("replicas", &Ranks::replicas)
      .def("part", py::overload_cast<std::int64_t, int>(&Ranks::part, py::const_))
      .def("share",
           [](Ranks& ranks, const std::string& text) { return released([&] { return ranks.share(text, poll); }); })
      .def("finish", [](Ranks& ranks, const std::string& error) { released([&] { ranks.finish(error, poll); }); });
  py::class_<LossRecord, std::shared_ptr<LossRecord>>(module, "LossRecord").def(py::init<>());
  module.def("hold_values", &hold_values);
  py::class_<StepOptions>(module, "StepOptions").def(py::init(&make_options));
  module.def("check_loss", &compare_losses);
  module.def("micro_batch_sizes", &micro_batch_sizes);
  py::class_<Namespace>(module, "Namespace").def(py::init<>()).def_static("shared", &Namespace::global);
  py::class_<SkipKey>(module, "SkipKey").def(py::init<Namespace, std::string>());
  module.def("stash", [](const SkipKey& key, const std::optional<at::Tensor>& tensor) {
    SkipContext::current().stash(key, tensor.value_or(at::Tensor()));
  });
  module.def("pop", [](const SkipKey& key) { return SkipContext::current().pop(key); });
  module.def("peek", [](const SkipKey& key) { return SkipContext::current().peek(key); });
  module.def("check_skips", &check_skips);

  py::class_<RandomScope>(module, "RandomScope").def(py::init<std::uint64_t, std::int64_t, std::int64_t>());
  module.def("scope_generator", &scope_generator);
  module.def("draw_seed", [] { return released(RandomScope::draw_seed); });
}

}  // namespace gpipe::python
