#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/Storage.h>

#include "tests/accelerator/stream_order.h"

namespace gpipe::accelerator {

inline constexpr auto kType = c10::DeviceType::PrivateUse1;

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

}  // namespace gpipe::accelerator
