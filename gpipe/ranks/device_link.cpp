#include "gpipe/ranks/device_link.h"

#include <ATen/ops/empty_strided.h>

#include <thread>

#include "gpipe/ranks/connections.h"
#include "gpipe/ranks/landing.h"

namespace gpipe {
namespace {

constexpr std::chrono::microseconds kQueryInterval{50};

}  // namespace

void DeviceLink::send(std::span<const at::Tensor> tensors) {
  if (tensors.empty()) return;
  const auto ready = record_event(device_);
  const OptionalStreamScope copying(stream_);
  wait(ready, device_);
  for (const auto& tensor : tensors) use_on_current_stream(tensor);
  wire_.transfer(tensors);
}

StreamEvents DeviceLink::receive(std::vector<Parcel>& parcels) {
  const OptionalStreamScope copying(stream_);
  Landing landing;
  for (auto& parcel : parcels) {
    for (auto& tensor : parcel.tensors) {
      if (!tensor.defined() || !tensor.is_meta()) continue;
      tensor = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(device_));
      landing.add(tensor);
    }
  }
  if (landing.received().empty()) return {};
  wire_.transfer(landing.received());
  landing.scatter();
  for (auto& parcel : parcels) parcel.renew_versions();
  return {record_event(device_)};
}

void DeviceLink::settle(std::chrono::milliseconds limit) {
  StreamEvent ended;
  {
    const OptionalStreamScope copying(stream_);
    ended = record_event(device_);
  }
  wait(ended, device_);
  const auto end = std::chrono::steady_clock::now() + limit;
  while (!ended->query()) {
    if (std::chrono::steady_clock::now() >= end) throw TimeoutError("another rank's device did not answer in time");
    std::this_thread::sleep_for(kQueryInterval);
  }
}

}  // namespace gpipe
