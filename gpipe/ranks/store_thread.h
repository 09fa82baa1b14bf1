#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <future>

#include "gpipe/ranks/connections.h"

// What ranks tell each other by a store, before they are connected. Each wait ends by its limit, and by an error of
// `poll`, which may be null.

namespace gpipe {

/// The store has not answered in time.
class StoreTimeout : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Uses a store on a thread of its own, because a use of c10d's stores can last for ever, as when the process that
/// serves a TCPStore is stopped. Thread-safe.
class StoreThread {
 public:
  using Open = std::function<c10::intrusive_ptr<c10d::Store>()>;
  /// Calls `open` on the thread.
  explicit StoreThread(Open open);
  /// Leaves the thread alone if the store does not answer.
  ~StoreThread();

  /// Returns what `use` returns for the store. Errors: those of `open`, `use` and `poll`; StoreTimeout after `limit`.
  template <typename Result>
  Result ask(std::function<Result(c10d::Store&)> use, std::chrono::milliseconds limit, const Poll& poll) {
    auto task = std::make_shared<std::packaged_task<Result(c10d::Store&)>>(std::move(use));
    auto answer = task->get_future();
    await(add([task](c10d::Store& store) { (*task)(store); }), limit, poll);
    return answer.get();
  }

  /// Returns the first of the keys that has a value, and the value; empty ones if none comes before `end`. `limit`: the
  /// longest wait for an answer.
  std::pair<std::string, std::string> await_any(const std::vector<std::string>& keys,
                                                std::chrono::steady_clock::time_point end,
                                                std::chrono::milliseconds limit, const Poll& poll);

 private:
  struct State;
  using Task = std::function<void(c10d::Store&)>;
  /// The future is ready when the task has run, or has the error of opening the store.
  std::future<void> add(Task task);
  void await(std::future<void> done, std::chrono::milliseconds limit, const Poll& poll);

  const std::shared_ptr<State> state_;  // shared with the thread, which may outlive this
  std::thread thread_;
};

/// Tells the store that this process is a rank. Errors: std::runtime_error if another process has come as this rank.
void claim_rank(StoreThread& store, int rank, std::chrono::milliseconds limit, const Poll& poll);

/// Returns a name that all ranks get in this attempt to run the job, and that no earlier attempt had. torchrun keeps
/// its store when it restarts ranks, and the hosts' counts of restarts may differ. REQUIRES: the processes of earlier
/// attempts have ended. Errors: std::runtime_error for ranks that do not come within `limit`, with their numbers.
std::string name_attempt(StoreThread& store, int rank, int size, std::chrono::milliseconds limit, const Poll& poll);

}  // namespace gpipe
