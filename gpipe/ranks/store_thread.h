#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <thread>

#include "gpipe/ranks/connections.h"

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
  Result ask(std::function<Result(c10d::Store&)> use, std::chrono::milliseconds limit, const Poll& poll);

  /// Calls `use` later, and ignores its errors.
  void post(std::function<void(c10d::Store&)> use);
  /// Calls `look` five times per second, between other uses, from now on. Ignores its errors.
  void look_often(std::function<void(c10d::Store&)> look);

  /// Whether the store has not answered the last question in time.
  bool is_stuck() const;

 private:
  struct State;
  /// A use of the store, or of the error of opening it.
  using Task = std::function<void(c10d::Store*, const std::exception_ptr&)>;
  void add(Task task);
  /// Waits until `is_ready`, which waits for at most the given time, returns true.
  void await(std::function<bool(std::chrono::milliseconds)> is_ready, std::chrono::milliseconds limit,
             const Poll& poll);

  const std::shared_ptr<State> state_;  // shared with the thread, which may outlive this
  std::thread thread_;
};

/// Returns the key's value, or "" if it does not come before `end`. Errors: as ask(), for each question with `limit`.
std::string await_value(StoreThread& store, const std::string& key, std::chrono::steady_clock::time_point end,
                        std::chrono::milliseconds limit, const Poll& poll);

/// Returns a store with this prefix that is not used any more when the process that serves it has ended: c10d then
/// prints a warning with a backtrace for each use. Notices the end of a TCPStore's process before a use, and of any
/// other store by the first use that fails. Uses after the end throw std::runtime_error.
c10::intrusive_ptr<c10d::Store> watched_store(const std::string& prefix, c10::intrusive_ptr<c10d::Store> store);

template <typename Result>
Result StoreThread::ask(std::function<Result(c10d::Store&)> use, std::chrono::milliseconds limit, const Poll& poll) {
  const auto promise = std::make_shared<std::promise<Result>>();
  auto answer = promise->get_future();
  add([promise, use = std::move(use)](c10d::Store* store, const std::exception_ptr& error) {
    try {
      if (error) std::rethrow_exception(error);
      promise->set_value(use(*store));
    } catch (...) {
      promise->set_exception(std::current_exception());
    }
  });
  await([&](auto time) { return answer.wait_for(time) == std::future_status::ready; }, limit, poll);
  return answer.get();
}

}  // namespace gpipe
