// Two workers increment one plain integer in the same run. Nothing orders the accesses, so ThreadSanitizer must report
// them, as it would in other tests.

#include <atomic>
#include <cstdint>
#include <thread>

#include "gpipe/runtime/executor.h"
#include "gpipe/schedules.h"

namespace gpipe {
namespace {

/// Worker 0 counts only after worker 1 has started, and worker 1 only after worker 0 has counted, so that ThreadSanitizer
/// reports the race on every run. The flags are relaxed atomics, which arrange this in time but create no ordering.
class Counter : public ActionRunner {
 public:
  void on_worker(int worker, absl::FunctionRef<void()> run_actions) override {
    if (worker == 1) started_.store(true, std::memory_order_relaxed);
    if (worker == 0) await(started_);
    run_actions();
  }

  void run(const Action& action, Measure) override {
    if (action.stage == 1) await(counted_);
    ++count_;
    if (action.stage == 0) counted_.store(true, std::memory_order_relaxed);
  }

 private:
  static void await(const std::atomic<bool>& flag) {
    while (!flag.load(std::memory_order_relaxed)) std::this_thread::yield();
  }

  /// Fills 8 bytes of its own. ThreadSanitizer remembers only four accesses per 8 bytes, and the flags are read often.
  std::int64_t count_ = 0;
  std::atomic<bool> started_ = false;
  std::atomic<bool> counted_ = false;
};

}  // namespace
}  // namespace gpipe

int main() {
  using namespace gpipe;
  const Layout layout{2, 1, {0, 1}};
  Counter counter;
  return Executor(2).run(Program::make(layout, {}, fill(layout)), Part::kAll, counter) ? 1 : 0;
}
