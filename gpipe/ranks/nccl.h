#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <memory>

#include "gpipe/ranks/device_wire.h"

namespace gpipe {

/// Makes wires between GPUs by c10d's NCCL backend. Each rank must call this with the same store. `limit`: the longest that a
/// transfer may take. Errors: std::invalid_argument if gpipe was built without NCCL, or torch has no CUDA.
std::unique_ptr<DeviceConnections> connect_by_nccl(const c10::intrusive_ptr<c10d::Store>& store,
                                                   std::chrono::milliseconds limit);

}  // namespace gpipe
