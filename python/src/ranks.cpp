#include "gpipe/ranks.h"

#include <pybind11/pybind11.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "python/src/interpreter.h"
#include "python/src/pipeline.h"

namespace gpipe::python {
namespace {

namespace py = pybind11;

/// Joins the processes of a group, or the processes that the environment describes if it is None. Time-outs are in seconds.
std::shared_ptr<Ranks> make_ranks(const c10d::ProcessGroup* group, double timeout, double join_timeout,
                                  const std::string& interface, int replicas, bool nccl) {
  const auto milliseconds = [](double seconds) {
    return std::chrono::ceil<std::chrono::milliseconds>(std::chrono::duration<double>(seconds));
  };
  auto options = RanksOptions().timeout(milliseconds(timeout)).join_timeout(milliseconds(join_timeout));
  options.interface(interface).replicas(replicas).nccl(nccl);
  return released([&] {
    if (group == nullptr) return Ranks::from_environment(options, poll);
    return std::make_shared<Ranks>(group->getStore(), group->getRank(), group->getSize(), options);
  });
}

}  // namespace

void init_ranks(py::module_& module) {
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
}

}  // namespace gpipe::python
