#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "gpipe/ranks/remote_edges.h"
#include "gpipe/runtime/executor.h"
#include "tests/ranks/fake_connections.h"
#include "tests/runtime/fake_cells.h"
#include "tests/runtime/generated_programs.h"

namespace gpipe::testing {

/// One call of all ranks: which program they run, and which sizes its messages have.
struct RanksCall {
  int program = 0;
  bool in_parts = false;
  std::uint64_t sizes = 0;
};

/// What goes wrong on one rank, before a call or in one of its actions.
struct RankFault {
  enum Kind { kNone, kLate, kThrow, kDeath, kStop };
  Kind kind = kNone;
  int rank = 0;
  std::size_t call = 0;  ///< the number of calls: after the last one
  std::optional<Action> action;
};

/// What a seed stands for.
struct GeneratedJob {
  std::uint64_t seed = 0;
  std::vector<GeneratedProgram> programs;  ///< with the same number of workers
  std::vector<FakeCells> references;       ///< by program
  std::vector<int> ranks;                  ///< by worker
  std::vector<RanksCall> calls;
  bool large_pieces = false;
  RankFault fault;

  int workers() const { return static_cast<int>(ranks.size()); }
  int size() const { return ranks.back() + 1; }
};

/// Why a job failed.
struct Cause {
  enum Kind { kThrown, kLost, kTimedOut, kOther };
  Kind kind;
  int rank;  ///< that threw, or that did not answer
  std::string text;
};

/// The first failure of any rank.
class Causes {
 public:
  void report(Cause cause) {
    std::lock_guard lock(mutex_);
    if (!first_) first_ = std::move(cause);
  }
  std::optional<Cause> first() const {
    std::lock_guard lock(mutex_);
    return first_;
  }

 private:
  mutable std::mutex mutex_;
  std::optional<Cause> first_;
};

/// One rank of a job, as a process would be: workers, wires, and the calls that all ranks make. Between calls all ranks
/// meet, so that each of them learns of any failure.
class FakeRank {
 public:
  FakeRank(const GeneratedJob& job, int rank, FakeNetwork& network, Causes& causes);

  /// Makes all calls and checks their results. Reports the first error, which ends it.
  void run();
  /// Whether run() has ended with an error.
  bool failed() const { return failed_; }

 private:
  class Cells;
  void make_calls(Wires& wires);
  void make_call(std::size_t call, Wires& wires, Executor& executor);
  void meet(std::size_t call, Wires& wires);
  void strike(std::size_t call, const std::optional<Action>& action);
  void report(const std::exception_ptr& error, int awaited);
  void check(const GeneratedProgram& generated, const FakeCells& reference, const FakeCells& cells) const;

  const GeneratedJob& job_;
  const int rank_;
  FakeNetwork& network_;
  Causes& causes_;
  const std::chrono::milliseconds limit_;
  int awaited_ = -1;  // in a meeting
  std::atomic<bool> dead_ = false;
  bool failed_ = false;
};

}  // namespace gpipe::testing
