#pragma once

#include <chrono>
#include <optional>
#include <span>
#include <vector>

#include "gpipe/ranks/device_wire.h"
#include "gpipe/tensors/parcel.h"
#include "gpipe/tensors/transfer.h"

namespace gpipe {

/// A worker's end of a wire between devices, with the copy stream that it uses.
///
/// Thread safety: used by the worker, while its compute stream is current.
class DeviceLink {
 public:
  /// `wire` must outlive this.
  DeviceLink(DeviceWire& wire, c10::Device device) : wire_(wire), device_(device), stream_(new_stream(device)) {}

  /// Sends tensors after the worker's present work. Errors: ConnectionError.
  void send(std::span<const at::Tensor> tensors);

  /// Receives the tensors for which the parcels have meta tensors. Returns the event after which they have come.
  /// Errors: ConnectionError.
  StreamEvents receive(std::vector<Parcel>& parcels);

  /// Waits until all transfers have ended. The worker's later work comes after them. Errors: TimeoutError.
  void settle(std::chrono::milliseconds limit);

 private:
  DeviceWire& wire_;
  const c10::Device device_;
  const std::optional<c10::Stream> stream_;
};

}  // namespace gpipe
