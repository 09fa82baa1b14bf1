#include <c10/core/impl/VirtualGuardImpl.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <string>
#include <utility>

#include "gpipe/autograd/random_scope.h"
#include "python/src/pipeline.h"

namespace gpipe::python {
namespace {

/// A random scope that ends at close(). REQUIRES: close() runs on the thread that made the object.
class OpenScope {
 public:
  OpenScope(std::uint64_t seed, std::int64_t layer, std::int64_t micro_batch)
      : scope_(std::in_place, seed, layer, micro_batch) {}
  void close() { scope_.reset(); }

 private:
  std::optional<RandomScope> scope_;
};

/// The generator that replaces a device's default generator in the calling thread's scope. None outside a scope.
std::optional<at::Generator> scope_generator(const std::string& device) {
  auto* scope = RandomScope::current();
  if (scope == nullptr) return std::nullopt;
  torch::Device place(device);
  if (!place.is_cpu() && !place.has_index()) place = c10::impl::VirtualGuardImpl(place.type()).getDevice();
  return scope->generator(place);
}

}  // namespace

void init_randomness(pybind11::module_& module) {
  pybind11::class_<OpenScope>(module, "RandomScope")
      .def(pybind11::init<std::uint64_t, std::int64_t, std::int64_t>())
      .def("close", &OpenScope::close);
  module.def("scope_generator", &scope_generator, pybind11::arg("device"));
  module.def("draw_seed", [] { return released(RandomScope::draw_seed); });
}

}  // namespace gpipe::python
