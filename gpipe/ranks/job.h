#pragma once

#include <sys/types.h>

#include <future>

#include "gpipe/ranks.h"
#include "gpipe/ranks/connections.h"
#include "gpipe/ranks/device_wire.h"

namespace gpipe {

/// The store of a job has not answered in time.
class StoreTimeout : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Returns use(), which runs on a thread of its own: a use of a c10d store never returns if the process that serves the
/// store is stopped. Destroys `use` before it returns. Errors: what `use` and `poll` throw; StoreTimeout.
template <typename Use>
auto apart(Use use, std::chrono::milliseconds limit, const Poll& poll) {
  std::promise<std::invoke_result_t<Use>> promise;
  auto answer = promise.get_future();
  std::thread([promise = std::move(promise), use = std::optional(std::move(use))]() mutable {
    try {
      auto result = (*use)();
      use.reset();
      promise.set_value(std::move(result));
    } catch (...) {
      use.reset();
      promise.set_exception(std::current_exception());
    }
  }).detach();
  for (const auto end = end_after(limit); answer.wait_for(kPollPeriod) != std::future_status::ready;) {
    if (std::chrono::steady_clock::now() >= end) {
      throw StoreTimeout("[gpipe] the store of the job has not answered within " + std::to_string(limit.count()) +
                         " ms: the process that serves it, rank 0 or torchrun, is stopped or cut off");
    }
    if (poll) poll();
  }
  return answer.get();
}

/// What the pipelines of a job share: the connections, which know the first failure. The end of a connection before all
/// ranks leave is a failure.
///
/// Thread safety: share() and finish() on one thread at a time; the other functions on any thread.
class Job {
 public:
  /// Connects the ranks. `ranks` must outlive this. Errors: std::runtime_error for ranks that do not come, and on all
  /// ranks after a failure of one; what `poll` throws.
  Job(c10::intrusive_ptr<c10d::Store> store, const Ranks& ranks, const JoinDevices& join_devices, const Poll& poll);
  /// finish(), unless it was called; reports an exception that unwinds the stack. REQUIRES: no pipelines are left.
  ~Job();

  Connections& connections() { return *connections_; }
  /// Wires between devices; null if tensors pass through the hosts.
  DeviceConnections* devices() const { return devices_.get(); }
  /// Connects `size` ranks that sum on the CPU, this one as `rank` among them. All of them call it. Errors:
  /// std::runtime_error if they cannot connect, or after a failure; what `poll` throws.
  c10::intrusive_ptr<c10d::Backend> connect_sums(const std::string& name, int rank, int size, const Poll& poll);

  /// Begins the next pipeline, in the same order on all ranks. Returns its number, from 1 on.
  int join();
  /// Call it while a message of a call that `rank` has to make has not come. If the rank has left the job, that is a
  /// failure. Errors: std::runtime_error then.
  void check_stays(int rank, Topic topic);
  /// Returns `poll`, whose exceptions are failures.
  Poll reporting(const Poll& poll);

  bool is_finished() const { return is_finished_; }
  std::string share(const std::string& text, const Poll& poll);  ///< as Ranks::share()
  /// As Ranks::finish(). REQUIRES: without a cause, no call runs.
  void finish(const std::string& cause, const Poll& poll);
  /// The cause of a failure, if an exception unwinds the stack.
  std::optional<std::string> unwinding() const;

 private:
  void connect(const Poll& poll);

  const Ranks& ranks_;
  const int rank_;
  const int exceptions_;  // on the stack when this was made
  const pid_t process_;
  const c10::intrusive_ptr<c10d::Store> store_;
  std::string name_;  // of this job in the store
  std::atomic<int> pipelines_ = 0;
  bool is_finished_ = false;
  std::unique_ptr<DeviceConnections> devices_;
  std::unique_ptr<Connections> connections_;
};

}  // namespace gpipe
