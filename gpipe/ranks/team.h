#pragma once

#include <set>

#include "gpipe/ranks/agreement.h"
#include "gpipe/ranks/job.h"
#include "gpipe/ranks/parcel_message.h"

namespace gpipe {

/// The ranks that run a pipeline and its replicas together: the wires to them, the agreement on each call, and the
/// first failure. A process with all workers is a team of one.
///
/// Thread safety: what waits for other ranks or uses wires() on one thread at a time; the other functions on any
/// thread. Invariants:
///   1. The first failure of any rank is the failure of all. It is published before the connections are closed.
///   2. After a failure every call throws.
class Team {
 public:
  /// A team of one.
  explicit Team(int workers) : of_workers_(workers) {}
  /// Joins the other ranks, which must give the same manifest. `of_workers` has the rank of each worker of this
  /// replica. An exception of `poll` is a failure. Errors: as check_manifests().
  Team(std::shared_ptr<Ranks> ranks, std::vector<int> of_workers, const Manifest& manifest, StructureCodec codec,
       const Poll& poll);
  /// Tells the other ranks, whose later calls throw.
  ~Team();

  int size() const { return mesh_.positions * mesh_.replicas; }
  int rank() const { return rank_; }
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

  /// The ranks that share a value: of a replica, with the same stages, or all. Outputs have wires of their own.
  enum class Group { kReplica, kReplicaOutputs, kCounterparts, kAll };

  // The following functions belong to a call. Errors: std::runtime_error if a rank has failed.

  /// Returns the parcel of rank `owner`, with copies of its tensors on the CPU. Ignores the other ranks' parcels.
  Parcel broadcast(Group group, int owner, Parcel parcel);
  /// Returns the parcels of the counterparts, in the order of replicas.
  std::vector<Parcel> all_gather(Parcel parcel);
  /// Returns the bytes of all ranks, in order, on rank 0; nothing on the other ranks.
  std::vector<std::string> gather(std::string bytes);

  /// A rank's clock, as rank 0 has measured it.
  struct Clock {
    double ahead = 0;  ///< seconds by which it is ahead of rank 0's clock
    double error = 0;  ///< the most by which `ahead` can be wrong
  };
  /// Returns the clocks of all ranks, in order, on rank 0; nothing on the other ranks.
  std::vector<Clock> clocks();

  /// REQUIRES: there are other ranks.
  Wires& wires() { return *wires_; }
  const StructureCodec& codec() const { return codec_; }
  /// The longest wait for another rank within a call. REQUIRES: there are other ranks.
  std::chrono::milliseconds timeout() const { return ranks_->options().timeout(); }
  /// Whether tensors go straight from the devices of one rank to the devices of another.
  bool has_device_wires() const { return job_ != nullptr && job_->devices() != nullptr; }
  /// Makes an end of a wire between two workers' devices, `device` here. Waits for the other. Reports ConnectionErrors.
  DeviceWire& connect_devices(int from, int to, c10::Device device);

  /// Sets what tells other ranks about this rank's workers while a part of a program runs; null at its end.
  void watch(std::function<Activity()> activity);
  /// Call in a backward that returns gradients to the autograd engine. If the engine fails after it, the next call
  /// tells the other ranks. Keeps `owner`, which must own this, until the engine ends.
  void watch_backward(std::shared_ptr<const void> owner);

  /// Reports a failure of this rank and closes the connections, unless a rank has failed before.
  void fail(const std::string& cause) noexcept;
  /// The same for a connection that failed while this rank waited for another one, for `what`.
  void fail(const ConnectionError& error, int awaited, const std::string& what) noexcept;
  /// Errors: std::runtime_error if a rank has failed.
  void check() const;
  /// Throws the first failure: `error` if that is this rank's own.
  [[noreturn]] void rethrow(const std::exception_ptr& error) const;

  // For GradientReduction.

  /// The group that sums over the ranks with the same stages on a device, or on the CPU if there is none for it. The
  /// first call for a device makes its group, in the same order on all of them.
  c10d::Backend& sums(c10::Device device);
  /// Waits for a sum; on a device, only the current stream waits. Errors: as check(), and those of the poll.
  void await(c10d::Work& sum, bool on_cpu);

 private:
  /// What a wire between two ranks carries: what a rank tells rank 0 and is told, results by their Group, and more.
  enum Subject { kWord, kDecision, kReplica, kReplicaOutputs, kCounterparts, kAll, kBytes, kPing, kGathered };
  static constexpr int kSubjects = 9;
  int wire_number(int subject, int from, int to) const;
  void expect(Subject subject, int from);
  void send(Subject subject, int to, Parcel parcel);
  Parcel receive(Subject subject, int from, const Poll& poll);
  Parcel receive(Subject subject, int from) { return receive(subject, from, poll_); }
  /// Calls `run`, which sends or receives `what`. On an error, this rank has failed.
  void transfer(const char* what, absl::FunctionRef<void()> run);
  /// Sends copies of a parcel's tensors to a group, because the caller may change these meanwhile.
  void send_copies(Subject subject, Group group, Parcel parcel);
  std::string receive_words(int from);
  std::string sums_name() const;
  std::string awaited_call(int from);  // see Job::Member
  std::string agree_on_words(const std::string& mine);
  void fail_in_sums(const std::string& error);
  bool has_failed_backward();
  void leave(const std::string& how);
  std::string activity();

  const std::shared_ptr<Ranks> ranks_;  // null in a team of one, as are the next members
  Job* const job_ = nullptr;
  std::unique_ptr<Wires> wires_;
  const Mesh mesh_;
  const int rank_ = 0;
  const std::vector<int> of_workers_;
  const StructureCodec codec_;
  const Poll poll_;
  int first_wire_ = 0;
  Mutex mutex_;
  std::function<Activity()> activity_ ABSL_GUARDED_BY(mutex_);
  std::set<int> handing_out_ ABSL_GUARDED_BY(mutex_);  // graph tasks
  std::atomic<int> awaited_ = -1;                      // the rank with which the caller exchanges words or results
  std::map<std::string, c10::intrusive_ptr<c10d::Backend>> sums_;  // by device
  std::string gone_;                                               // why the pipeline of a rank is gone
  std::map<int, std::string> early_words_;                         // by rank: of a call that this rank has not made yet
  std::set<int> expected_;                                         // the wires whose next message has been announced
  std::atomic<std::uint64_t> calls_ = 0;
};

}  // namespace gpipe
