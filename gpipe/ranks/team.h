#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "gpipe/ranks/device_wire.h"
#include "gpipe/ranks/parcel_message.h"
#include "gpipe/ranks/proposal.h"
#include "gpipe/ranks/remote_edges.h"
#include "gpipe/tensors/parcel.h"

namespace gpipe {

class GradientReduction;

/// The ranks that run a pipeline and its replicas together. `Alone` is a team of one.
///
/// Thread safety: the functions that wait for other ranks or use wires() on one thread at a time; the others on any
/// thread.
/// Invariants:
///   1. The first failure of any rank is the failure of all. It is published before the connections are closed.
///   2. After a failure every call throws.
class Team {
 public:
  virtual ~Team() = default;

  virtual int size() const = 0;
  virtual int rank() const = 0;
  virtual int replicas() const = 0;
  int replica() const { return replica_of(rank()); }
  virtual int replica_of(int rank) const = 0;
  /// The rank of each worker of this replica.
  virtual const std::vector<int>& of_workers() const = 0;
  bool is_here(int worker) const { return of_workers()[worker] == rank(); }
  /// The rank that has this rank's stages in another replica.
  virtual int counterpart(int replica) const = 0;

  /// Begins a call. Errors: std::runtime_error if the proposals differ, another rank has withdrawn, or a rank has
  /// failed.
  virtual Agreement agree(Proposal proposal) = 0;
  /// Makes the call that the other ranks begin throw there, because it cannot begin here.
  virtual void withdraw(const std::string& reason) noexcept = 0;
  /// The number of calls that were agreed on or withdrawn.
  virtual std::uint64_t calls() const = 0;

  /// The ranks that share a value: the ranks of a replica, those with the same stages (counterparts), or all. Outputs
  /// have wires of their own, which keep the last layout.
  enum class Group { kReplica, kReplicaOutputs, kCounterparts, kAll };

  // The following functions belong to a call. Errors: std::runtime_error if a rank has failed.

  /// Returns the parcel of rank `owner`, with copies of its tensors on the CPU. Ignores the other ranks' parcels.
  virtual Parcel broadcast(Group group, int owner, Parcel parcel) = 0;
  /// Returns the parcels of the counterparts, in the order of replicas.
  virtual std::vector<Parcel> all_gather(Parcel parcel) = 0;
  /// Returns the bytes of all ranks, in order, on rank 0; nothing on the other ranks.
  virtual std::vector<std::string> gather(std::string bytes) = 0;
  /// Sums the gradients of parameters, per stage, over replicas. REQUIRES: there are several replicas.
  virtual std::unique_ptr<GradientReduction> begin_sum(std::vector<std::vector<at::Tensor>> parameters) = 0;

  /// A rank's clock, as rank 0 has measured it.
  struct Clock {
    double ahead = 0;  ///< seconds by which it is ahead of rank 0's clock
    double error = 0;  ///< the most by which `ahead` can be wrong
  };
  /// Returns the clocks of all ranks, in order, on rank 0; nothing on the other ranks.
  virtual std::vector<Clock> clocks() = 0;

  /// The wires to other ranks; null if there are none.
  virtual Wires* wires() = 0;
  virtual const StructureCodec& codec() const = 0;
  /// The longest wait for another rank within a call.
  virtual std::chrono::milliseconds timeout() const = 0;
  /// Whether tensors go straight from the devices of one rank to the devices of another.
  virtual bool has_device_wires() const = 0;
  /// Makes this rank's end of a wire between the devices of two workers, one of them on another rank. Waits for the
  /// other end. `device`: the device of this rank's worker. Errors: ConnectionError, which it reports.
  virtual DeviceWire& connect_devices(int from, int to, c10::Device device) = 0;

  /// Sets what tells other ranks about this rank's workers while a part of a program runs; null at its end.
  virtual void watch(std::function<Activity()> activity) = 0;
  /// Call in a backward that returns gradients of the pipeline to the autograd engine. If the engine does not end well
  /// after it, the next call tells the other ranks. Keeps `owner`, which must own this, until then.
  virtual void watch_backward(std::shared_ptr<const void> owner) = 0;

  /// Reports a failure of this rank and closes the connections, unless a rank has failed before.
  virtual void fail(const std::string& cause) noexcept = 0;
  /// The same for a connection that failed while this rank waited for another one, for `what`.
  virtual void fail(const ConnectionError& error, int awaited, const std::string& what) noexcept = 0;
  /// Errors: std::runtime_error if a rank has failed.
  virtual void check() const = 0;
  /// Throws the first failure: `error` if that is this rank's own.
  [[noreturn]] virtual void rethrow(const std::exception_ptr& error) const = 0;
};

/// One process with all workers.
class Alone : public Team {
 public:
  explicit Alone(int workers) : of_workers_(workers) {}

  int size() const override { return 1; }
  int rank() const override { return 0; }
  int replicas() const override { return 1; }
  int replica_of(int) const override { return 0; }
  const std::vector<int>& of_workers() const override { return of_workers_; }
  int counterpart(int) const override { return 0; }
  Agreement agree(Proposal proposal) override {
    ++calls_;
    return {proposal.number, {proposal.weight}, {proposal.micro_batches}};
  }
  void withdraw(const std::string&) noexcept override {}
  std::uint64_t calls() const override { return calls_; }
  Parcel broadcast(Group, int, Parcel parcel) override { return parcel; }
  std::vector<Parcel> all_gather(Parcel parcel) override { return {std::move(parcel)}; }
  std::vector<std::string> gather(std::string bytes) override { return {std::move(bytes)}; }
  std::unique_ptr<GradientReduction> begin_sum(std::vector<std::vector<at::Tensor>>) override { refuse(); }
  std::vector<Clock> clocks() override { return {{}}; }
  Wires* wires() override { return nullptr; }
  const StructureCodec& codec() const override { return codec_; }
  std::chrono::milliseconds timeout() const override { return {}; }
  bool has_device_wires() const override { return false; }
  DeviceWire& connect_devices(int, int, c10::Device) override { refuse(); }
  void watch(std::function<Activity()>) override {}
  void watch_backward(std::shared_ptr<const void>) override {}
  void fail(const std::string&) noexcept override {}
  void fail(const ConnectionError&, int, const std::string&) noexcept override {}
  void check() const override {}
  [[noreturn]] void rethrow(const std::exception_ptr& error) const override { std::rethrow_exception(error); }

 private:
  [[noreturn]] static void refuse() { throw std::logic_error("a team of one rank was asked for another rank"); }

  const std::vector<int> of_workers_;
  const StructureCodec codec_;
  std::uint64_t calls_ = 0;
};

}  // namespace gpipe
