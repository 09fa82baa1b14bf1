#include "gpipe/runtime/transfer.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_to_copy.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>

#include "absl/cleanup/cleanup.h"

namespace gpipe {
namespace {

c10::impl::VirtualGuardImpl guard_of(c10::Device device) { return c10::impl::VirtualGuardImpl(device.type()); }

StreamEvent record(c10::EventFlag flag, c10::Device device) {
  auto event = std::make_shared<c10::Event>(device.type(), flag);
  event->record(guard_of(device).getStream(device));
  return event;
}

}  // namespace

StreamEvent record_event(c10::Device device) {
  return device.is_cpu() ? nullptr : record(c10::EventFlag::PYTORCH_DEFAULT, device);
}

StreamEvent record_timed_event(c10::Device device) { return record(c10::EventFlag::BACKEND_DEFAULT, device); }

void wait(const StreamEvent& event, c10::Device device) {
  if (event && !device.is_cpu()) event->block(guard_of(device).getStream(device));
}

StreamEvents record_events(std::span<const at::Tensor> tensors, c10::Device device) {
  StreamEvents events;
  std::vector<c10::Device> known;
  const auto record = [&](c10::Device on) {
    if (on.is_cpu() || std::find(known.begin(), known.end(), on) != known.end()) return;
    known.push_back(on);
    events.push_back(record_event(on));
  };
  record(device);
  for (const auto& tensor : tensors) {
    if (tensor.defined()) record(tensor.device());
  }
  return events;
}

void wait(const StreamEvents& events, c10::Device device) {
  for (const auto& event : events) wait(event, device);
}

void use_on_current_stream(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.is_cpu()) return;
  if (tensor.is_sparse()) {
    use_on_current_stream(tensor._indices());
    return use_on_current_stream(tensor._values());
  }
  if (!tensor.has_storage()) return;
  const auto guard = guard_of(tensor.device());
  guard.recordDataPtrOnStream(tensor.storage().data_ptr(), guard.getStream(tensor.device()));
}

OptionalStreamScope::OptionalStreamScope(const std::optional<c10::Stream>& stream) {
  if (!stream) return;
  const auto guard = guard_of(stream->device());
  previous_device_ = guard.exchangeDevice(stream->device());
  previous_stream_ = guard.exchangeStream(*stream);
}

OptionalStreamScope::~OptionalStreamScope() {
  if (!previous_stream_) return;
  const auto guard = guard_of(previous_stream_->device());
  guard.exchangeStream(*previous_stream_);
  guard.uncheckedSetDevice(*previous_device_);
}

CurrentStreams::CurrentStreams(std::span<const c10::Device> devices) {
  for (const auto device : devices) {
    if (device.is_cpu()) continue;
    const auto stream = guard_of(device).getStream(device);
    if (std::find(streams_.begin(), streams_.end(), stream) == streams_.end()) streams_.push_back(stream);
  }
}

void CurrentStreams::during(absl::FunctionRef<void()> function) const {
  const auto exchange = [](const c10::Stream& stream) { return guard_of(stream.device()).exchangeStream(stream); };
  std::vector<c10::Stream> previous;
  previous.reserve(streams_.size());
  const absl::Cleanup restore = [&] { std::for_each(previous.rbegin(), previous.rend(), exchange); };
  for (const auto& stream : streams_) previous.push_back(exchange(stream));
  function();
}

std::optional<c10::Stream> new_stream(c10::Device device) {
  if (device.is_cpu()) return std::nullopt;
  return guard_of(device).getStreamFromGlobalPool(device, /*isHighPriority=*/false);
}

Link new_link(c10::Device from, c10::Device to) {
  if (from == to) return {};
  return {new_stream(from), new_stream(to)};
}

void copy_to_device(std::span<at::Tensor> tensors, const StreamEvents& ready, c10::Device to, const Link& link) {
  at::NoGradGuard no_grad;
  const auto stays = [&](const at::Tensor& tensor) { return tensor.defined() && tensor.device() == to; };
  if (std::any_of(tensors.begin(), tensors.end(), stays)) wait(ready, to);
  StreamEvent copied;
  {
    // PyTorch orders a copy between devices after the current streams of both. Make those the copy streams, so that the
    // copy does not wait for computation.
    OptionalStreamScope target(link.target);
    OptionalStreamScope source(link.source);
    auto source_device = to;
    for (auto& tensor : tensors) {
      if (!tensor.defined() || tensor.device() == to) continue;
      if (tensor.device() != source_device) {
        source_device = tensor.device();
        wait(ready, source_device);
      }
      use_on_current_stream(tensor);
      const bool between_accelerators = !to.is_cpu() && !tensor.is_cpu();
      tensor = at::_to_copy(tensor, tensor.options().device(to), /*non_blocking=*/between_accelerators);
    }
    if (source_device != to) copied = record_event(to);
  }
  wait(copied, to);
  for (const auto& tensor : tensors) use_on_current_stream(tensor);
}

}  // namespace gpipe
