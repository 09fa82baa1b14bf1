#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>

namespace gpipe {

/// Uses a store on a thread of its own, so that a store that does not answer blocks no other thread.
///
/// Thread safety: all functions may be called on any thread.
class StoreThread {
 public:
  using Task = std::function<void(c10d::Store&)>;
  using Question = std::function<std::string(c10d::Store&)>;

  /// Uses a clone of the store. Calls `often` five times per second until this is destroyed.
  StoreThread(const c10::intrusive_ptr<c10d::Store>& store, Task often);
  /// Leaves the thread alone if the store does not answer. What the tasks use must then stay.
  ~StoreThread();
  StoreThread(const StoreThread&) = delete;
  StoreThread& operator=(const StoreThread&) = delete;

  /// Calls `task` later. Its errors are ignored.
  void post(Task task);
  /// Returns the answer; std::nullopt if the store fails or does not answer within a second.
  std::optional<std::string> ask(Question question);

 private:
  struct State;
  static void run(State& state, c10d::Store& store, const Task& often);

  const std::shared_ptr<State> state_;
  std::thread thread_;
};

}  // namespace gpipe
