#define USE_C10D_GLOO
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "gpipe/ranks/device_wire.h"

namespace gpipe {

c10::intrusive_ptr<c10d::Backend> connect_by_gloo(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                                  const std::string& host, std::chrono::milliseconds limit) {
  const auto options = c10d::ProcessGroupGloo::Options::create(limit);
  options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname(host));
  return c10::make_intrusive<c10d::ProcessGroupGloo>(store, rank, size, options);
}

}  // namespace gpipe
