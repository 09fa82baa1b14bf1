#pragma once

#include <sys/types.h>

#include <exception>
#include <memory>
#include <optional>

#include "absl/functional/function_ref.h"
#include "gpipe/base/mutex.h"
#include "gpipe/timeline.h"

namespace gpipe {

/// Bytes in use: now, and the peak since the last query.
struct Bytes {
  std::int64_t live = 0;
  std::int64_t peak = 0;
};

/// The first error of a run.
struct Failure {
  std::exception_ptr error;
  /// The action that threw; std::nullopt if the error came from a worker's set-up or from `poll`.
  std::optional<Action> action = std::nullopt;
};

/// Runs the actions of a program when the executor says. Can pass data between actions without locks, because an edge's
/// put happens before its take.
class ActionRunner {
 public:
  virtual ~ActionRunner() = default;

  /// Called once per run on each worker's thread. Sets up the thread, calls run_actions(), which does not throw, once,
  /// and restores the thread. Can throw.
  virtual void on_worker(int worker, absl::FunctionRef<void()> run_actions) = 0;

  /// Calls a function once and measures it: the span of the action in a timeline.
  using Measure = absl::FunctionRef<void(absl::FunctionRef<void()>)>;
  /// Runs an action on its worker's thread. Receives from and sends to other processes outside of `measure`. Can throw.
  virtual void run(const Action& action, Measure measure) = 0;

  /// Called once when a run fails, on the thread that failed. From then on run() must not wait for other processes.
  virtual void cancel(const Failure& /*failure*/) noexcept {}

  /// A worker's allocated bytes. Called on its thread before and after each action of a run with a timeline.
  virtual Bytes bytes(int /*worker*/) { return {}; }
};

/// One direction of one edge during one run: tells which micro-batches have been put. Their data is not in it: it is
/// written before put(), which happens before take(), and read after that. A micro-batch is put once and taken once.
///
/// Thread safety: one thread puts, one takes (it can be the same), any thread cancels.
class Channel {
 public:
  /// REQUIRES: micro_batches >= 1.
  explicit Channel(int micro_batches) : put_(micro_batches) {}

  /// `time` is for take() only.
  void put(int micro_batch, double time = 0);
  /// Waits until the micro-batch has been put. Returns the time that put() was given, or std::nullopt if cancelled.
  std::optional<double> take(int micro_batch);
  /// From then on no call waits, and take() returns std::nullopt.
  void cancel();

 private:
  Mutex mutex_;
  CondVar changed_;
  std::vector<std::optional<double>> put_ ABSL_GUARDED_BY(mutex_);  // times
  bool cancelled_ ABSL_GUARDED_BY(mutex_) = false;
};

/// Persistent worker threads that run programs. For each action of its list, a worker takes the action's edges (see
/// Wiring), calls an ActionRunner, and puts the action's edges, each in ascending order. The first error cancels every
/// channel, and each worker stops before its next action.
///
/// Some of a program's workers can be in other processes. ActionRunner::run() serves the edges to them.
///
/// Thread safety: run() can be called from any thread that is not one of the workers, by one at a time.
class Executor {
 public:
  /// Starts the threads of a program's `workers` from `first` on; the others are in other processes. While run() waits,
  /// it calls `poll`, unless that is null, every 50 ms; an exception from it is an error of the run. Errors:
  /// std::system_error if a thread cannot be started.
  explicit Executor(int workers, std::function<void()> poll = nullptr, int first = 0);
  /// Joins the threads, unless forked() or the process exits. REQUIRES: no run is in progress.
  ~Executor();

  int workers() const { return static_cast<int>(workers_.size()); }
  /// Whether this process was forked from the one that made the executor. It then has no worker threads.
  bool forked() const;

  /// Checks that run() can be called here. Errors: std::logic_error if forked(), and on one of the workers.
  void check_caller() const;

  /// Runs a part of the program. Returns the first failure, if any, when all workers are idle. With a timeline, appends
  /// the actions that ran, with the given step and times of now(), and sets its workers and edges. Without one, reads
  /// no clock. REQUIRES: the program has the executor's workers, and is two_phase() unless the part is kAll. Errors: as
  /// check_caller().
  std::optional<Failure> run(const Program& program, Part part, ActionRunner& runner, Timeline* timeline = nullptr,
                             int step = 0);

 private:
  class Run;
  class Worker;

  void wait_for(Worker& worker, Run& run);

  const std::function<void()> poll_;
  const int first_;
  const pid_t process_;
  std::vector<std::unique_ptr<Worker>> workers_;
};

}  // namespace gpipe
