#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>

#include "gpipe/tensors/parcel.h"
#include "gpipe/tensors/transfer.h"

namespace gpipe {

/// An end of a wire that carries tensors from one rank's device to another's, in order. Used by one thread at a time.
class DeviceWire {
 public:
  virtual ~DeviceWire() = default;

  /// Sends the tensors, or at the receiving end receives into them. Enqueues this on the current stream of the end's
  /// device, and does not wait for the device. REQUIRES: the tensors are on that device, have no gaps, and have the
  /// same types, sizes and strides at both ends; a send is enqueued before its receive. Errors: ConnectionError.
  virtual void transfer(std::span<const at::Tensor> tensors) = 0;
};

/// This process's wires between devices. Thread-safe.
class DeviceConnections {
 public:
  virtual ~DeviceConnections() = default;

  /// The type of the devices that can be connected.
  virtual c10::DeviceType device_type() const = 0;

  /// Makes an end of a wire, which lives as long as this. Waits for the end of the same name. Errors: ConnectionError.
  virtual DeviceWire& connect(const std::string& name, bool sends, c10::Device device) = 0;

  /// Makes a group of `size` ranks, one device each, which all make it under one name; null if it cannot. Gradients are
  /// summed by its all-reduce. Errors: ConnectionError.
  virtual c10::intrusive_ptr<c10d::Backend> group(const std::string& name, int rank, int size) = 0;

  /// Ends all transfers in flight. Their streams go on, but what was received has any values. Can be repeated.
  virtual void abort() noexcept = 0;
};

/// Makes wires between GPUs by c10d's NCCL backend. Each rank must call this with the same store. `limit`: the longest
/// that a transfer may take. Errors: std::invalid_argument if gpipe was built without NCCL, or torch has no CUDA.
std::unique_ptr<DeviceConnections> connect_by_nccl(const c10::intrusive_ptr<c10d::Store>& store,
                                                   std::chrono::milliseconds limit);

/// Makes a group of ranks that sums on the CPU, by c10d's Gloo backend. Waits until all have come. `host`: an address of
/// this host. `limit`: the longest that a sum may take. Errors: those of c10d.
c10::intrusive_ptr<c10d::Backend> connect_by_gloo(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                                  const std::string& host, std::chrono::milliseconds limit);

/// A worker's end of a DeviceWire, with its copy stream. Used by the worker, while its compute stream is current.
class DeviceLink {
 public:
  /// `wire` must outlive this.
  DeviceLink(DeviceWire& wire, c10::Device device) : wire_(wire), device_(device), stream_(new_stream(device)) {}

  /// Sends tensors after the worker's present work. Errors: ConnectionError.
  void send(std::span<const at::Tensor> tensors);
  /// Receives the parcels' meta tensors. Returns the event after which they have come. Errors: ConnectionError.
  StreamEvents receive(std::vector<Parcel>& parcels);
  /// Waits until all transfers have ended, which the worker's later work comes after. Returns false after `limit`.
  bool settle(std::chrono::milliseconds limit);

 private:
  DeviceWire& wire_;
  const c10::Device device_;
  const std::optional<c10::Stream> stream_;
};

}  // namespace gpipe
