#pragma once

#include <set>

#include "absl/functional/function_ref.h"
#include "gpipe/ranks/agreement.h"
#include "gpipe/ranks/job.h"
#include "gpipe/ranks/transport.h"

namespace gpipe {

/// What all ranks of a pipeline must agree on when it is made: names and values, in order.
using Manifest = std::vector<std::pair<std::string, std::string>>;

/// The ranks that run a pipeline and its replicas together: the messages between them, the agreement on each call, and
/// the first failure. A process with all workers is a team of one.
///
/// Thread safety: what waits for other ranks on one thread at a time, except receive(); the other functions on any
/// thread. Invariant: after a failure of any rank, every call throws.
class Team {
 public:
  /// A team of one.
  explicit Team(int workers) : of_workers_(workers) {}
  /// Joins the other ranks. `of_workers` has the rank of each worker of this replica. An exception of `poll` is a
  /// failure. Errors: std::runtime_error, on all ranks, if the manifests differ, with both values, or a rank has failed
  /// or does not come.
  Team(std::shared_ptr<Ranks> ranks, std::vector<int> of_workers, bool has_device_wires, const Manifest& manifest,
       StructureCodec codec, const Poll& poll);
  /// Tells the other ranks, whose later calls throw.
  ~Team();

  int size() const { return mesh_.positions * mesh_.replicas; }
  int rank() const { return rank_; }
  const Mesh& mesh() const { return mesh_; }
  int replicas() const { return mesh_.replicas; }
  int replica() const { return replica_of(rank_); }
  int replica_of(int rank) const { return mesh_.replica_of(rank); }
  /// The rank of each worker of this replica.
  const std::vector<int>& of_workers() const { return of_workers_; }
  bool is_here(int worker) const { return of_workers_[worker] == rank_; }
  /// The rank that has this rank's stages in another replica.
  int counterpart(int replica) const { return mesh_.rank_at(mesh_.position_of(rank_), replica); }

  /// Begins a call. Errors: std::runtime_error if the proposals differ, or a rank has withdrawn or failed.
  Agreement agree(Proposal proposal);
  /// Makes the call that the other ranks begin throw there, because it cannot begin here.
  void withdraw(const std::string& reason) noexcept;
  /// The number of calls that were agreed on or withdrawn.
  std::uint64_t calls() const { return calls_; }

  /// The ranks that share a value: of a replica, or with the same stages.
  enum class Group { kReplica, kCounterparts };

  // The following functions belong to a call. Errors: std::runtime_error if a rank has failed.

  /// Returns the parcel of rank `owner`, with copies of its tensors on the CPU, except those on `meta`. Ignores the other
  /// ranks' parcels.
  Parcel broadcast(Group group, int owner, Parcel parcel);
  /// Returns the parcels of the counterparts, in the order of replicas.
  std::vector<Parcel> all_gather(Parcel parcel);
  /// Returns the bytes of all ranks, in order, on rank 0; nothing on the other ranks.
  std::vector<std::string> gather(std::string bytes);
  /// Returns rank 0's bytes on all ranks.
  std::string share(std::string bytes);

  /// A rank's clock, as rank 0 has measured it.
  struct Clock {
    double ahead = 0;  ///< seconds by which it is ahead of rank 0's clock
    double error = 0;  ///< the most by which `ahead` can be wrong
  };
  /// Returns the clocks of all ranks, in order, on rank 0; nothing on the other ranks.
  std::vector<Clock> clocks();

  /// Sends a message of an action to a worker of another rank. Errors: ConnectionError.
  void send(int from, int to, const Action& action, Outgoing message);
  /// Waits for the next message between two workers. Returns also its action, whose kind is F or B. Errors:
  /// ConnectionError.
  std::pair<Action, Received> receive_next(int from, int to);
  const StructureCodec& codec() const { return codec_; }

  /// The longest wait for another rank within a call. REQUIRES: there are other ranks.
  std::chrono::milliseconds timeout() const { return ranks_->options().timeout(); }
  bool shares_outputs() const { return ranks_->options().share_outputs(); }  ///< REQUIRES: as timeout()
  /// Whether tensors go straight from the devices of one rank to the devices of another.
  bool has_device_wires() const { return has_device_wires_; }
  /// Makes an end of a wire between two workers' devices, `device` here. Waits for the other. Reports ConnectionErrors.
  /// `stream`: see DeviceLink.
  DeviceLink connect_devices(int from, int to, c10::Device device, const std::optional<c10::Stream>& stream);

  /// The group that sums over the ranks with the same stages on a device, or on the CPU if there is none for it. The
  /// first call for a device makes its group, in the same order on all of them.
  c10d::Backend& sums(c10::Device device);
  /// Waits for a sum; on a device, only the current stream waits. Errors: as check(), and those of the poll.
  void await(c10d::Work& sum, bool on_cpu);

  /// Call in a backward that returns gradients to the autograd engine. If the engine fails after it, the next call
  /// tells the other ranks. Keeps `owner`, which must own this, until the engine ends.
  void watch_backward(std::shared_ptr<const void> owner);

  /// Reports a failure of this rank and closes the connections, unless a rank has failed before.
  void fail(const std::string& cause) noexcept;
  /// The same for an error, whose place `where` tells: of a rank that did not answer in time, or of this one.
  void fail(const std::exception_ptr& error, const std::string& where) noexcept;
  bool has_failed() const { return job_ != nullptr && !job_->connections().failure().empty(); }
  /// Errors: std::runtime_error if a rank has failed.
  void check() const;
  /// Throws the first failure: `error` if that is this rank's own.
  [[noreturn]] void rethrow(const std::exception_ptr& error) const;

 private:
  enum Subject { kCall, kDecision, kResult, kToWorkers };
  Topic topic(int subject) const { return {pipeline_, subject}; }
  int topic_of_workers(int from, int to) const { return kToWorkers + from * static_cast<int>(of_workers_.size()) + to; }
  void send(Subject subject, int to, Outgoing message);
  Received receive(Subject subject, int from);
  /// Calls `run`, which sends or receives `what`. On an error, this rank has failed.
  void transfer(const char* what, absl::FunctionRef<void()> run);
  void send_copies(Group group, Parcel parcel);
  Parcel receive_parcel(int from);
  /// Returns the texts of all ranks, in order, on rank 0; nothing on the others.
  std::vector<std::string> collect(Subject subject, std::string mine);
  /// Returns rank 0's text on all ranks.
  std::string distribute(Subject subject, std::string text);
  std::string decide_on_call(const std::string& mine);
  std::string sums_name() const;
  void fail_in_sums(const std::string& error);
  bool has_failed_backward();
  void leave() noexcept;

  const std::shared_ptr<Ranks> ranks_;  // null in a team of one, as is the next member
  Job* const job_ = nullptr;
  const Mesh mesh_;
  const int rank_ = 0;
  const std::vector<int> of_workers_;
  const bool has_device_wires_ = false;
  const StructureCodec codec_;
  const Poll poll_;
  const int pipeline_ = 0;
  Mutex mutex_;
  std::set<int> handing_out_ ABSL_GUARDED_BY(mutex_);              // graph tasks
  std::map<std::string, c10::intrusive_ptr<c10d::Backend>> sums_;  // by device
  std::string gone_;                                               // why the pipeline of a rank is gone
  std::atomic<std::uint64_t> calls_ = 0;
};

}  // namespace gpipe
