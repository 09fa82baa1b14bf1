#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <span>
#include <string>

namespace gpipe {

/// An end of a wire that carries tensors from a device of one rank to a device of another rank, in order.
///
/// Thread safety: used by one thread at a time.
class DeviceWire {
 public:
  virtual ~DeviceWire() = default;

  /// Sends the tensors, or at the receiving end receives into them. Enqueues this on the current stream of the end's
  /// device, and does not wait for the device. Both ends give tensors of the same types, sizes and strides.
  /// REQUIRES: the tensors are on that device and have no gaps. A send is enqueued before its receive.
  /// Errors: ConnectionError.
  virtual void transfer(std::span<const at::Tensor> tensors) = 0;
};

/// This process's wires between devices.
///
/// Thread safety: all functions may be called on any thread.
class DeviceConnections {
 public:
  virtual ~DeviceConnections() = default;

  /// The type of the devices that can be connected.
  virtual c10::DeviceType device_type() const = 0;

  /// Makes an end of a wire, which lives as long as this. Waits for the other end, which has the same name.
  /// Errors: ConnectionError.
  virtual DeviceWire& connect(const std::string& name, bool sends, c10::Device device) = 0;

  /// Ends all transfers in flight. Their streams go on, but what was received has any values. Can be repeated.
  virtual void abort() noexcept = 0;
};

}  // namespace gpipe
