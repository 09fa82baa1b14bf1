#pragma once

#include <sys/types.h>

#include "gpipe/ranks.h"
#include "gpipe/ranks/device_wire.h"
#include "gpipe/ranks/store_thread.h"

namespace gpipe {

/// What the pipelines of a job share: the connections, which any failure closes, and the first failure. The end of a
/// connection before all ranks leave is a failure. Until a first pipeline is made, failures are told by the store too.
///
/// Thread safety: join() and share() on one thread at a time; the other functions on any thread.
class Job {
 public:
  /// `devices` may be null. `ranks` must outlive this.
  Job(c10::intrusive_ptr<c10d::Store> store, const Ranks& ranks, std::unique_ptr<DeviceConnections> devices);
  /// finish(), unless it was called; reports an exception that unwinds the stack. REQUIRES: no pipelines are left.
  ~Job();

  /// Begins the next pipeline, in the same order on all ranks. Connects the ranks for the first one. Returns the
  /// pipeline's number, from 1 on. Errors: std::runtime_error for ranks that do not come, and after a failure.
  int join(const Poll& poll);
  /// Call it when a pipeline is made on all ranks. `leave` ends its calls, and tells the other ranks.
  void add(int pipeline, std::function<void()> leave);
  void remove(int pipeline);

  /// Connects `size` ranks that sum on the CPU, this one as `rank` among them. All of them call it, after join().
  /// Errors: std::runtime_error if they cannot connect, or after a failure; those of `poll`.
  c10::intrusive_ptr<c10d::Backend> connect_sums(const std::string& name, int rank, int size, const Poll& poll);

  std::string share(const std::string& text, const Poll& poll);  ///< as Ranks::share()

  /// REQUIRES: join() has returned.
  Connections& connections() { return *connections_; }
  /// Wires between devices; null if tensors pass through the hosts.
  DeviceConnections* devices() const { return devices_.get(); }

  /// Reports a failure of this rank to all, and closes the connections, unless a rank has failed before.
  void report(const std::string& cause) noexcept;
  /// The first failure that this rank knows; empty if there is none.
  std::string failure() const;
  /// Whether this rank reported it.
  bool is_own() const;
  /// Errors: std::runtime_error if there is a failure; `what` says what it prevents.
  void check(const std::string& what = "a rank has failed") const;

  /// Whether only the thread that made this has made calls. Call it before each.
  bool has_one_caller();
  /// Call it on rank 0 while it waits for a rank to make a call of a pipeline. Errors: std::runtime_error if that rank
  /// waits in a call of another pipeline, and no other thread of either rank makes calls.
  void check_order(int pipeline, int rank);

  /// As Ranks::finish(). REQUIRES: without a cause, no call runs.
  void finish(const std::string& cause, const Poll& poll);

  /// The cause of a failure, if an exception unwinds the stack.
  std::optional<std::string> unwinding() const;

 private:
  std::string first_failure(const std::string& cause) noexcept;
  void note(const std::string& cause, bool is_own) noexcept;
  void note_end(int rank, const std::string& cause) noexcept;
  void check_and_poll(const Poll& poll);
  std::string await_key(const std::string& key, std::chrono::steady_clock::time_point end, const Poll& poll);
  void connect(const Poll& poll);
  void leave_together(const Poll& poll);

  const Ranks& ranks_;
  const int rank_;
  const int exceptions_;  // on the stack when this was made
  const pid_t process_;
  const std::thread::id caller_;
  const c10::intrusive_ptr<c10d::Store> shared_;
  std::string host_;  // at which this rank listens
  int pipelines_ = 0;
  int texts_ = 0;
  bool finished_ = false;
  std::atomic<bool> is_joined_ = false;  // a pipeline has been made
  std::atomic<bool> leaving_ = false;
  mutable Mutex mutex_;
  std::string failure_ ABSL_GUARDED_BY(mutex_);
  bool is_own_ ABSL_GUARDED_BY(mutex_) = false;
  std::map<int, std::function<void()>> members_ ABSL_GUARDED_BY(mutex_);  // what leaves, by pipeline
  bool has_one_caller_ ABSL_GUARDED_BY(mutex_) = true;
  std::unique_ptr<DeviceConnections> devices_;
  std::unique_ptr<StoreThread> store_;
  std::unique_ptr<Connections> connections_;  // changed under the lock
};

}  // namespace gpipe
