#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Device.h>

#include <atomic>
#include <memory>

#include "tests/accelerator/memory.h"

// A device for tests: four accelerators whose memory is the host's and whose operators run on the CPU, at once.
// Streams, events, memory and copies report to stream_order(), which checks that work is ordered.
//
// The device is PyTorch's PrivateUse1 back-end, under the name "checked". Loading this library registers it.
//
// Not modelled: the time that work takes, kernels that PyTorch's dispatcher does not call, and limits of memory.

namespace gpipe::accelerator {

inline constexpr int kDevices = 4;

inline c10::Device device(int index) { return {kType, static_cast<c10::DeviceIndex>(index)}; }

/// While it is true, no event is over.
std::atomic<bool>& held();

/// Returns the CPU generator inside a generator of a device.
at::Generator host_generator(const at::Generator& generator);

/// Returns the default generator of a device.
const at::Generator& default_generator(c10::Device device);

/// Names the actions of pipelines in violations and counts, as long as the result lives: listens to their ranges for
/// profilers.
std::shared_ptr<void> name_actions();

}  // namespace gpipe::accelerator
