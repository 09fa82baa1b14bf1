#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/Storage.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <atomic>
#include <memory>
#include <vector>

#include "tests/accelerator/stream_order.h"

// A device for tests: eight accelerators whose memory is the host's and whose operators run on the CPU, at once.
// Streams, events, memory and copies report to stream_order(), which checks that work is ordered.
//
// The device is PyTorch's PrivateUse1 back-end, under the name "checked". Loading this library registers it.
//
// Not modelled: the time that work takes, kernels that PyTorch's dispatcher does not call, and limits of memory.

namespace gpipe::accelerator {

inline constexpr auto kType = c10::DeviceType::PrivateUse1;
inline constexpr int kDevices = 8;

inline c10::Device device(int index) { return {kType, static_cast<c10::DeviceIndex>(index)}; }

/// Whether memory of the host is pinned, as Tensor::pin_memory() makes it.
bool is_pinned(const void* memory);

/// While it is true, no event is over.
std::atomic<bool>& held();

/// Returns the CPU generator inside a generator of a device.
at::Generator host_generator(const at::Generator& generator);

/// Returns the default generator of a device.
const at::Generator& default_generator(c10::Device device);

/// Names the actions of pipelines in violations and counts, as long as the result lives: listens to their ranges for
/// profilers.
std::shared_ptr<void> name_actions();

/// A device's memory: a storage of the host. Its address on the device is another one, which the host cannot read.
struct Block {
  c10::Storage host;
  Allocation allocation;
};

/// The checker of all devices. Lives until the process ends.
StreamOrder& stream_order();

/// The index of the stream that is current on a device, for this thread.
int current_stream(c10::Device device);

/// Makes a storage of the host the memory of a device, allocated on its current stream.
c10::DataPtr adopt(c10::Storage host, c10::Device device);

/// Returns the block behind device memory; nullptr for other memory.
Block* block_of(const c10::DataPtr& data);
inline Block* block_of(const at::Tensor& tensor) { return block_of(tensor.storage().data_ptr()); }

/// Whether the block's host storage was resized since adopt() returned `data`.
bool is_stale(const Block& block, const c10::DataPtr& data);

/// Allocates on the current device. Lives until the process ends.
c10::Allocator& allocator();

inline bool on_device(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kType; }

/// For its lifetime, operators of CPU tensors run nothing but their kernels.
class KernelsOnly {
 private:
  at::AutoDispatchBelowADInplaceOrView below_autograd_;
  c10::impl::ExcludeDispatchKeyGuard no_interception_{c10::DispatchKeySet(c10::DispatchKey::DeferredInit) |
                                                      c10::autocast_dispatch_keyset};
};

/// Gives a tensor the sizes, strides and offset of another.
void take_shape(const at::Tensor& tensor, const at::Tensor& of);

/// Returns a CPU tensor with the memory of a device's tensor.
at::Tensor alias_on_host(const at::Tensor& tensor);

/// Adds an operation's use of a tensor. A CPU tensor and one without elements have no memory to check.
void add_access(const at::Tensor& tensor, bool writes, std::vector<Access>& accesses);

}  // namespace gpipe::accelerator
