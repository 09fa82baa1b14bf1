#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <memory>
#include <optional>
#include <span>

namespace gpipe {

/// Stream order for whatever accelerator a pipeline runs on, through c10's device-generic interface, so that it is one
/// piece of code for all of them. Where only the CPU is involved nothing here does anything. Nothing here blocks the
/// host, except copies between the host and a device.

/// A point in a device's work; empty on CPU.
using StreamEvent = std::shared_ptr<c10::Event>;

/// What has been enqueued on the device's current stream by now.
StreamEvent record_event(c10::Device device);

/// Makes the device's current stream wait for a mark of any device.
void wait(const StreamEvent& mark, c10::Device device);

/// Tells the allocator that the current stream of the tensor's device uses its memory too.
void use_on_current_stream(const at::Tensor& tensor);

/// Makes a stream its device's current one, and that device the thread's, for a scope. Does nothing for std::nullopt.
class OptionalStreamScope {
 public:
  explicit OptionalStreamScope(const std::optional<c10::Stream>& stream);
  ~OptionalStreamScope();
  OptionalStreamScope(const OptionalStreamScope&) = delete;
  OptionalStreamScope& operator=(const OptionalStreamScope&) = delete;

 private:
  std::optional<c10::Stream> previous_stream_;
  std::optional<c10::Device> previous_device_;
};

/// A stream of the device's own pool; none on CPU.
std::optional<c10::Stream> new_stream(c10::Device device);

/// The copy streams of one directed link between two devices, out of their pools.
struct Link {
  std::optional<c10::Stream> source;
  std::optional<c10::Stream> target;
};
Link new_link(c10::Device from, c10::Device to);

/// Brings tensors that were complete at `ready` to a device, for use on its current stream. On the same device the
/// tensors themselves are returned; between devices the copy runs on the link's streams and overlaps with computation.
/// Undefined tensors stay so.
void copy_to_device(std::span<at::Tensor> tensors, const StreamEvent& ready, c10::Device to, const Link& link);

}  // namespace gpipe
