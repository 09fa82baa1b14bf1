#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <vector>

namespace gpipe {

// Streams, events and copies for any accelerator, through c10's device-generic interface. The CPU has no streams: its
// work runs on the calling thread.

/// An event on a device's stream; null on the CPU.
using StreamEvent = std::shared_ptr<c10::Event>;

/// Records an event after the work enqueued so far on the device's current stream.
StreamEvent record_event(c10::Device device);

/// The same, with an event that has a time. REQUIRES: not the CPU.
StreamEvent record_timed_event(c10::Device device);

/// Makes the device's current stream wait for an event of any device; on the CPU, this thread.
void wait(const StreamEvent& event, c10::Device device);

/// Events on several devices; empty if all are CPUs.
using StreamEvents = std::vector<StreamEvent>;

/// Records an event on each accelerator that holds one of the tensors, and on `device`.
StreamEvents record_events(std::span<const at::Tensor> tensors, c10::Device device);

/// Makes the device's current stream, or this thread, wait for all of them.
void wait(const StreamEvents& events, c10::Device device);

/// Tells the allocator that the current stream of the tensor's device also uses the tensor's memory.
void use_on_current_stream(const at::Tensor& tensor);

/// Returns a stream from the device's pool; std::nullopt on the CPU.
std::optional<c10::Stream> new_stream(c10::Device device);

/// The copy streams of one directed link between two devices.
struct Link {
  std::optional<c10::Stream> source;
  std::optional<c10::Stream> target;
};
/// Takes the streams from the devices' pools. The link of a device to itself has none.
Link new_link(c10::Device from, c10::Device to);

/// Whether sizes and strides tell all about a tensor's memory.
bool has_plain_memory(const at::Tensor& tensor);

/// Returns the part of a tensor that leaves out what dimensions of stride 0 repeat.
at::Tensor without_repeats(at::Tensor tensor);

/// Returns the address of a tensor's first element modulo 64 bytes; 0 outside of the CPU.
std::size_t lead_of(const at::Tensor& tensor);

/// Returns a tensor without values, whose first element is `lead` bytes behind an address that is a multiple of 64.
at::Tensor empty_at(at::IntArrayRef sizes, at::IntArrayRef strides, const at::TensorOptions& options, std::size_t lead);

/// Returns a copy on the device `to` with the same strides and, on the CPU, the same address modulo 64 bytes, because
/// the bits of products depend on it. A dimension of stride 0 is copied once. Sparse and nested tensors are cloned.
at::Tensor copy_of(const at::Tensor& tensor, c10::Device to, bool non_blocking = false);
at::Tensor copy_of(const at::Tensor& tensor);

/// Gives `to` the values of `from`, and its sizes and strides. Writes in place if these are equal, which does not advance
/// the version counter.
void overwrite(const at::Tensor& to, const at::Tensor& from);

/// A tensor and a copy of its value.
struct TensorCopy {
  at::Tensor tensor;
  at::Tensor value;
};
/// Copies each tensor. On an accelerator, dense tensors of one type take one kernel together.
std::vector<TensorCopy> copies_of(const std::vector<at::Tensor>& tensors);
/// Puts the values back, as overwrite() does.
void overwrite(const std::vector<TensorCopy>& copies);

/// Replaces each tensor by a copy on the device `to`. The copies start after `ready` and run on the link's streams, so
/// that they overlap with computation; the host waits for none, because its memory is pinned. Autograd does not record
/// them; they have the versions of the originals. Leaves undefined tensors and those on the device. Returns events
/// behind the copies.
StreamEvents start_copies(std::span<at::Tensor> tensors, const StreamEvents& ready, c10::Device to, const Link& link);

/// The same, for use on the device's current stream, or on the CPU by this thread.
StreamEvents copy_to_device(std::span<at::Tensor> tensors, const StreamEvents& ready, c10::Device to, const Link& link);

}  // namespace gpipe
