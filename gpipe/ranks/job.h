#pragma once

#include <sys/types.h>

#include <atomic>

#include "gpipe/ranks.h"
#include "gpipe/ranks/device_wire.h"
#include "gpipe/ranks/failure_board.h"
#include "gpipe/ranks/meeting.h"
#include "gpipe/ranks/remote_edges.h"
#include "gpipe/ranks/socket.h"

namespace gpipe {

/// What the pipelines of a job share: the connections, which any failure closes, and the first failure. The end of a
/// connection before all ranks leave is a failure.
///
/// Thread safety: join() and share() on one thread at a time; the other functions on any thread.
class Job {
 public:
  /// `devices` may be null. `ranks` must outlive this.
  Job(c10::intrusive_ptr<c10d::Store> store, const Ranks& ranks, std::unique_ptr<DeviceConnections> devices);
  /// finish(), unless it was called; reports an exception that unwinds the stack. REQUIRES: no pipelines are left.
  ~Job();

  /// Meets the other ranks to make the next pipeline, in the same order on all. Returns the first of `wires` numbers
  /// for its wires. Errors: as check_manifests(); ConnectionError; std::runtime_error after a failure.
  int join(const Manifest& manifest, int wires, const Poll& poll);

  std::string share(const std::string& text, const Poll& poll);  ///< as Ranks::share()

  /// Connects `size` ranks that sum on the CPU, this one as `rank` among them. All of them call it, after join(). Errors:
  /// std::runtime_error if they cannot connect, or after a failure; those of `poll`.
  c10::intrusive_ptr<c10d::Backend> connect_sums(const std::string& name, int rank, int size, const Poll& poll);

  /// REQUIRES: join() has returned.
  Connections& connections() { return *connections_; }
  /// Wires between devices; null if tensors pass through the hosts.
  DeviceConnections* devices() const { return devices_.get(); }
  FailureBoard& board() { return *board_; }

  /// A pipeline of this rank.
  struct Member {
    /// Says what it does: the number of the rank that it waits for, or words; empty for nothing.
    std::function<std::string()> activity;
    std::function<void()> leave;  ///< ends its calls, and tells the other ranks
    /// On rank 0: returns the call of this pipeline in which another rank waits for this one; empty if there is none,
    /// or if several threads of that rank make calls. REQUIRES: no other thread uses the pipeline.
    std::function<std::string(int rank)> awaited_call;
    int number = 0;  ///< in the order in which pipelines are made; add() sets it
  };
  /// Call it after join(). `owner` identifies it.
  void add(const void* owner, Member member);
  void remove(const void* owner);

  /// Whether only the thread that made this has made calls. Call it before each.
  bool has_one_caller();
  /// Call it on rank 0 while it waits for a rank to call the pipeline of `owner`, or to make one if that is null.
  /// Errors: std::runtime_error if that rank waits in a call of another pipeline.
  void check_order(const void* owner, int rank);

  /// As Ranks::finish(). REQUIRES: without a cause, no call runs.
  void finish(const std::string& cause, const Poll& poll);

  /// The cause of a failure, if an exception unwinds the stack.
  std::optional<std::string> unwinding() const;

 private:
  /// Tells the other ranks where this one listens.
  Socket listen(const Poll& poll);
  void connect(Socket listener, const Poll& poll);
  void note_loss(int rank, const std::string& cause) noexcept;
  /// Waits until all ranks have called this, for at most the time-out, or until a rank is lost.
  void leave_together(const Poll& poll);
  void report_stop(const std::exception& error);
  void check_and_poll(const Poll& poll);
  void close() noexcept;
  std::string activity();

  const Ranks& ranks_;
  const int rank_;
  const int exceptions_;  // on the stack when this was made
  const pid_t process_;
  const std::thread::id caller_;
  int pipelines_ = 0;
  int texts_ = 0;
  int next_wire_ = 1;  // the tags before are those of leave_together()
  Mutex mutex_;
  std::map<const void*, Member> members_ ABSL_GUARDED_BY(mutex_);
  bool has_one_caller_ ABSL_GUARDED_BY(mutex_) = true;
  bool finished_ = false;
  std::atomic<bool> leaving_ = false;
  std::string host_;  // at which this rank listens
  const c10::intrusive_ptr<c10d::Store> shared_;
  std::unique_ptr<DeviceConnections> devices_;
  std::unique_ptr<StoreThread> store_;
  std::unique_ptr<FailureBoard> board_;
  std::unique_ptr<Connections> connections_;  // changed under the lock
};

}  // namespace gpipe
