#include <pybind11/pybind11.h>

#include <optional>
#include <utility>

#include "gpipe/autograd/random_scope.h"
#include "python/src/pipeline.h"

namespace gpipe::python {
namespace {

/// Ends at close(), which comes on the thread that made it.
class OpenScope {
 public:
  OpenScope(std::uint64_t seed, std::int64_t layer, std::int64_t micro_batch)
      : scope_(std::in_place, seed, layer, micro_batch) {}
  void close() { scope_.reset(); }

 private:
  std::optional<RandomScope> scope_;
};

}  // namespace

void init_randomness(pybind11::module_& module) {
  pybind11::class_<OpenScope>(module, "RandomScope")
      .def(pybind11::init<std::uint64_t, std::int64_t, std::int64_t>())
      .def("close", &OpenScope::close);
  module.def("draw_seed", [] { return released(RandomScope::draw_seed); });
}

}  // namespace gpipe::python
