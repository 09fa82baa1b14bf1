#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>

#include "gpipe/base/mutex.h"
#include "gpipe/ranks.h"
#include "gpipe/tensors/parcel.h"
#include "gpipe/tensors/transfer.h"

namespace gpipe {

using DeviceGroup = c10::intrusive_ptr<c10d::Backend>;

/// This process's groups of ranks with one device each, between which tensors go without the host. Thread-safe.
class DeviceConnections {
 public:
  explicit DeviceConnections(JoinDevices join) : join_(std::move(join)) {}
  ~DeviceConnections() { abort(); }

  /// Errors: ConnectionError, also after abort().
  DeviceGroup join(const std::string& name, int rank, int size);
  /// Ends all transfers in flight. Their streams go on, but what was received has any values. Can be repeated.
  void abort() noexcept;

 private:
  const JoinDevices join_;
  Mutex mutex_;
  bool is_aborted_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<DeviceGroup> groups_ ABSL_GUARDED_BY(mutex_);
};

/// Makes a group of ranks that sums on the CPU, by c10d's Gloo backend. Waits until all have come. `host`: an address
/// of this host. `limit`: the longest that a sum may take. Errors: c10d's.
c10::intrusive_ptr<c10d::Backend> connect_by_gloo(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                                  const std::string& host, std::chrono::milliseconds limit);

/// A worker's end of a wire to a worker of another rank: carries tensors from device to device, in order. Used by the
/// worker, while its compute stream is current.
class DeviceLink {
 public:
  static constexpr int kSender = 0;
  static constexpr int kReceiver = 1;
  /// Waits for the other end. `group`: of the sender and the receiver. `stream`: the one on which all transfers of the
  /// worker run, in turn. Errors: ConnectionError.
  DeviceLink(DeviceGroup group, c10::Device device, const std::optional<c10::Stream>& stream);

  /// Sends tensors after the worker's present work, before their header is sent. Errors: ConnectionError.
  void send(std::span<const at::Tensor> tensors);
  /// Receives the parcels' meta tensors. Returns the event after which they have come. Errors: ConnectionError.
  StreamEvents receive(std::vector<Parcel>& parcels);
  /// Returns the event after which all transfers so far are over.
  StreamEvent end();

 private:
  void transfer(std::span<const at::Tensor> tensors);

  const DeviceGroup group_;
  const c10::Device device_;
  const std::optional<c10::Stream> stream_;
};

}  // namespace gpipe
