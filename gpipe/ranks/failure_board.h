#pragma once

#include <optional>

#include "gpipe/ranks/store_thread.h"

namespace gpipe {

/// Tells all ranks of the first failure of any rank, through a store, into which it looks five times per second.
///
/// Thread safety: all functions may be called on any thread. Invariant: once set, the failure never changes, and is the
/// same on all ranks that can reach the store.
class FailureBoard {
 public:
  struct Callbacks {
    /// Called once, on any thread, after the first failure is known. It must not throw.
    std::function<void()> on_failure;
    /// Says what this rank does: the number of the rank that it waits for, or words. Called on any thread.
    std::function<std::string()> activity;
  };
  /// `store` must outlive this, and nothing else may look there often.
  FailureBoard(StoreThread& store, int rank, int size, Callbacks callbacks);
  /// Callbacks have ended then.
  ~FailureBoard();

  /// Reports a failure of this rank, unless there was one before.
  void report(const std::string& cause) noexcept;
  /// Reports that this rank has waited in vain for `what`. Asks all ranks, and blames the end of the chain of waits.
  void report_wait(int awaited, const std::string& what) noexcept;
  /// Reports that the connection to a rank was lost. If that rank closed it after a failure, it has reported this.
  void report_loss(int lost) noexcept;
  /// Reports that this rank could not connect to the others. The cause names the ranks that do not answer.
  void report_no_connection(const std::string& error) noexcept;

  /// Looks no more, because the store may end soon.
  void rest() noexcept;
  /// Waits until all ranks know the failure of one, for at most a short time.
  void await_others() noexcept;

  /// The first failure; empty if there is none.
  std::string failure() const;
  /// Errors: std::runtime_error if there is one; `what` says what it prevents.
  void check(const std::string& what) const;
  /// Whether this rank reported it.
  bool is_own() const;

 private:
  struct State;
  using Question = std::function<std::string(c10d::Store&)>;
  /// Returns the answer; std::nullopt if the store fails or does not answer within a second.
  std::optional<std::string> ask(Question question);
  /// What the rank does; empty if it does not say so before `end`. Looks once in any case.
  std::string answer_of(int rank, std::chrono::steady_clock::time_point end);
  void ask_all_ranks();

  StoreThread& store_;
  const int rank_;
  const int size_;
  const std::shared_ptr<State> state_;  // shared with the store's thread, which may outlive this
};

}  // namespace gpipe
