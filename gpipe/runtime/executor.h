#pragma once

#include <sys/types.h>

#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "gpipe/runtime/cells.h"
#include "gpipe/runtime/mutex.h"
#include "gpipe/schedule/program.h"
#include "gpipe/schedule/timeline.h"

namespace gpipe {

/// Which part of each worker's list a run calls. Parts other than kAll need a program in two phases: in others, what is
/// put in one part is taken in the next.
enum class Part {
  kAll,
  kForward,   ///< the leading forwards
  kBackward,  ///< all that follows them
};

/// The first thing that went wrong in a run.
struct Failure {
  std::exception_ptr error;
  /// The action that threw; none when it was the worker's set-up.
  std::optional<Action> action;
};

/// Persistent worker threads that interpret programs. Knows no tensors: it calls lists, waits on channels and calls
/// Cells.
///
/// Rules of a run: an action takes its edges (F: the stage's in-edges; B and I: the gradients of its out-edges; R and W
/// none), is performed, then puts its edges (F: out-edges; B and I: the gradients of its in-edges), in ascending order.
/// The first error cancels every channel; a worker stops before its next action; run() returns when all are at rest.
///
/// Thread safety: run() may be called from any thread that is not one of the workers; concurrent calls take turns.
class Executor {
 public:
  /// Starts the threads. While run() waits for them it calls `poll` now and then, if there is one, on its own thread;
  /// what that throws is an error of the run. Errors: std::invalid_argument for less than one worker;
  /// std::system_error.
  explicit Executor(int workers, std::function<void()> poll = nullptr);
  /// Joins the threads; no run may be under way. In a process that was forked off there are none to join.
  ~Executor();
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  int workers() const { return static_cast<int>(workers_.size()); }
  /// True on one of this executor's own threads, where run() would wait for itself.
  bool on_worker() const;
  /// True in a process that was forked off this executor's: its threads stayed behind.
  bool forked() const;

  /// Errors: std::logic_error when on_worker() or forked(), where run() cannot work.
  void check_caller() const;

  /// Walks the part of the program with the cells and returns when all workers are at rest: the first failure, or none.
  /// With a timeline, appends what ran to its end, as seconds on std::chrono::steady_clock, labelled `step`, and makes
  /// its workers and edges the program's; without, reads no clock.
  /// Errors, before anything runs: those of check_caller(); std::logic_error when the program needs another number of
  /// workers, or when it is not in two phases and the part is not kAll.
  std::optional<Failure> run(const Program& program, Part part, Cells& cells, Timeline* timeline = nullptr,
                             int step = 0);

 private:
  class Run;
  class Worker;

  void wait_for(Worker& worker, Run& run);

  const std::function<void()> poll_;
  const pid_t process_;
  const double cpu_quota_;  // when this was made
  Mutex turn_;
  std::vector<std::unique_ptr<Worker>> workers_;
};

}  // namespace gpipe
