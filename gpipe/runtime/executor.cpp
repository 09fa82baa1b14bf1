#include "gpipe/runtime/executor.h"

#include <unistd.h>

#include <cassert>
#include <deque>
#include <stdexcept>
#include <thread>

#include "gpipe/base/checks.h"
#include "gpipe/base/clock.h"
#include "gpipe/runtime/exit.h"
#include "gpipe/runtime/thread_clock.h"

namespace gpipe {
namespace {

thread_local const Executor* owner_of_this_thread = nullptr;

}  // namespace

void Channel::put(int micro_batch, double time) {
  {
    MutexLock lock(mutex_);
    assert(!put_[micro_batch]);
    put_[micro_batch] = time;
  }
  changed_.notify_all();
}

std::optional<double> Channel::take(int micro_batch) {
  MutexLock lock(mutex_);
  while (!put_[micro_batch] && !cancelled_) changed_.wait(mutex_);
  return cancelled_ ? std::nullopt : put_[micro_batch];
}

void Channel::cancel() {
  {
    MutexLock lock(mutex_);
    cancelled_ = true;
  }
  changed_.notify_all();
}

/// One run, shared by the workers. Invariants:
///   1. failure_ and failed_ are set together, at most once, and never cleared. Every channel is cancelled afterwards,
///      so that each worker notices at its next wait, or at the check before its next action.
///   2. A channel is cancelled only if failure_ is set.
///   3. Only worker w uses spans_[w] until all workers are idle. Then only the caller does.
class Executor::Run {
 public:
  Run(const Executor& owner, const Program& program, Part part, ActionRunner& runner, bool timed, int step)
      : owner_(owner),
        program_(program),
        part_(part),
        runner_(runner),
        timed_(timed),
        step_(step),
        spans_(program.workers()) {
    for (std::size_t c = 0; c < 2 * program.edges().size(); ++c) channels_.emplace_back(program.layout().micro_batches);
  }

  /// Runs the worker's actions, on its thread. Does not throw.
  void work(int worker) {
    try {
      runner_.on_worker(worker, [&] { run_actions(worker); });
    } catch (...) {
      fail({std::current_exception()});
    }
  }

  /// Records the error and cancels all channels, unless the run has failed already.
  void fail(const Failure& failure) {
    {
      MutexLock lock(mutex_);
      if (failure_) return;
      failure_ = failure;
      failed_ = true;
    }
    for (Channel& channel : channels_) channel.cancel();
    runner_.cancel(failure);
  }

  std::optional<Failure> failure() {
    MutexLock lock(mutex_);
    return failure_;
  }

  /// REQUIRES: all workers are idle.
  const std::vector<std::vector<Span>>& spans() const { return spans_; }

 private:
  bool is_here(int worker) const { return worker >= owner_.first_ && worker < owner_.first_ + owner_.workers(); }
  bool has_channel(int edge) const {
    const auto& placement = program_.layout().placement;
    return is_here(placement[program_.edges()[edge].from]) && is_here(placement[program_.edges()[edge].to]);
  }

  /// What a worker measures of its current action.
  struct Watch {
    struct Reading {
      double time = 0;
      ThreadClock::Times thread;
    };
    Reading read() const { return {now(), clock.read()}; }

    const ThreadClock clock;
    Reading free = read();    ///< after the previous action, and what it sent to other processes
    double ready = 0;         ///< when the worker was free and the inputs from this process had come
    ThreadClock::Times from;  ///< of the thread, about then
    bool is_local = true;     ///< whether all inputs come from this process
  };

  void run_actions(int worker) {
    std::optional<Watch> watch;
    if (timed_) watch.emplace();
    for (const Action& action : program_.actions(worker, part_)) {
      if (!take(action, watch) || !perform(worker, action, watch)) return;
      const double time = watch ? now() : 0;
      for (const int edge : program_.wiring().puts(action)) {
        if (has_channel(edge)) channel(edge, action).put(action.micro_batch, time);
        if (watch && !has_channel(edge)) watch->free = watch->read();
      }
    }
  }

  Channel& channel(int edge, const Action& action) { return channels_[2 * edge + (action.kind == Kind::F ? 0 : 1)]; }

  bool take(const Action& action, std::optional<Watch>& watch) {
    double last = 0;
    const auto asked = watch ? watch->read() : Watch::Reading();
    if (watch) watch->is_local = true;
    for (const int edge : program_.wiring().takes(action)) {
      const auto put = has_channel(edge) ? channel(edge, action).take(action.micro_batch) : 0;
      if (!put) return false;
      last = std::max(last, *put);
      if (watch) watch->is_local &= has_channel(edge);
    }
    if (!watch) return true;
    watch->ready = std::max(watch->free.time, last);
    watch->from = last > asked.time || !watch->is_local ? asked.thread : watch->free.thread;
    return true;
  }

  bool perform(int worker, const Action& action, std::optional<Watch>& watch) {
    if (failed_) return false;
    try {
      runner_.run(action, [&](absl::FunctionRef<void()> run) { watch ? record(worker, action, *watch, run) : run(); });
    } catch (...) {
      fail({std::current_exception(), action});
      return false;
    }
    return true;
  }

  void record(int worker, const Action& action, Watch& watch, absl::FunctionRef<void()> run) {
    // Reads the bytes after the time, so that memory freed before that time is not counted.
    const double start = now();
    double lead = start - watch.ready;
    // Inputs from another process came at the latest when the thread began to wait for a core.
    if (!watch.is_local) lead = std::min(lead, (watch.clock.read() - watch.from).queued);
    const auto before = runner_.bytes(worker).live;
    run();
    watch.free = watch.read();
    const auto [live, peak] = runner_.bytes(worker);
    Span span{worker, action, start, watch.free.time, step_, {before, peak, live}, start};
    span.lead = std::max(0.0, lead);
    const auto [ran, queued] = watch.free.thread - watch.from;
    const double seconds = span.lead + span.end - span.start;
    span.queued = std::min(queued, seconds);
    span.blocked = std::max(0.0, seconds - span.queued - ran);
    spans_[worker].push_back(span);
  }

  const Executor& owner_;
  const Program& program_;
  const Part part_;
  ActionRunner& runner_;
  const bool timed_;
  const int step_;
  std::deque<Channel> channels_;  // per edge: forward, backward
  std::vector<std::vector<Span>> spans_;
  Mutex mutex_;
  std::optional<Failure> failure_ ABSL_GUARDED_BY(mutex_);
  std::atomic<bool> failed_ = false;
};

/// One thread, which works on one run at a time. Invariants:
///   1. The executor sets run_ when it is null. The thread clears it after its last access to the run.
///   2. stopping_ is set once, when run_ is null.
class Executor::Worker {
 public:
  Worker(const Executor& owner, int index) : owner_(owner), index_(index), thread_([this] { loop(); }) {}

  ~Worker() {
    {
      MutexLock lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

  /// Starts a run; null ends it.
  void set_run(Run* run) {
    {
      MutexLock lock(mutex_);
      run_ = run;
    }
    changed_.notify_all();
  }

  /// Waits for at most `time`. Returns whether the run has ended.
  bool wait_for(std::chrono::milliseconds time) {
    const auto end = std::chrono::steady_clock::now() + time;
    MutexLock lock(mutex_);
    while (run_ != nullptr && std::chrono::steady_clock::now() < end) changed_.wait_until(mutex_, end);
    return run_ == nullptr;
  }

 private:
  Run* next_run() {
    MutexLock lock(mutex_);
    while (run_ == nullptr && !stopping_) changed_.wait(mutex_);
    return run_;
  }

  void loop() {
    owner_of_this_thread = &owner_;
    while (Run* run = next_run()) {
      {
        const ExitGuard guard;
        run->work(index_);
      }
      set_run(nullptr);
    }
  }

  const Executor& owner_;
  const int index_;
  Mutex mutex_;
  CondVar changed_;
  Run* run_ ABSL_GUARDED_BY(mutex_) = nullptr;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;  // last, because the thread uses the other members
};

Executor::Executor(int workers, std::function<void()> poll, int first)
    : poll_(std::move(poll)), first_(first), process_(getpid()) {
  for (int w = 0; w < workers; ++w) workers_.push_back(std::make_unique<Worker>(*this, first + w));
}

Executor::~Executor() {
  if (!forked() && !process_exits()) return;
  for (auto& worker : workers_) static_cast<void>(worker.release());
}

bool Executor::forked() const { return getpid() != process_; }

void Executor::check_caller() const {
  if (owner_of_this_thread == this) {
    throw std::logic_error(
        "[gpipe] a pipeline was called on one of its own workers, which would wait for itself: "
        "a pipeline cannot contain itself");
  }
  if (forked()) {
    throw std::logic_error(
        "[gpipe] this process was forked after the pipeline was made, and has none of its threads: make the pipeline "
        "in the process that uses it");
  }
}

void Executor::wait_for(Worker& worker, Run& run) {
  while (!worker.wait_for(kPollPeriod)) {
    try {
      if (poll_) poll_();
      if (process_exits()) throw_error("the process exits");
    } catch (...) {
      run.fail({std::current_exception()});
    }
    const ExitGuard sleeps_if_process_exits;  // a worker that exits never ends its run
  }
}

std::optional<Failure> Executor::run(const Program& program, Part part, ActionRunner& runner, Timeline* timeline,
                                     int step) {
  check_caller();
  Run run(*this, program, part, runner, timeline != nullptr, step);
  const ExitGuard guard;
  for (const auto& worker : workers_) worker->set_run(&run);
  for (const auto& worker : workers_) wait_for(*worker, run);
  if (timeline != nullptr) {
    timeline->workers = program.workers();
    timeline->edges = program.edges();
    for (const auto& spans : run.spans()) timeline->spans.insert(timeline->spans.end(), spans.begin(), spans.end());
  }
  return run.failure();
}

}  // namespace gpipe
