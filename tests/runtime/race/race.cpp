// Two workers increment one plain integer in the same run. With the argument "edge", an edge between their cells orders
// the accesses. With "race" nothing does, and ThreadSanitizer must report it, as it would in other tests.

#include <atomic>
#include <cstdint>
#include <string>
#include <thread>

#include "gpipe/runtime/executor.h"
#include "gpipe/schedules.h"

namespace gpipe {
namespace {

/// Worker 0 counts only after worker 1 has started, so that only the edge can order the two accesses. Worker 1 counts
/// only after worker 0 has counted, so that ThreadSanitizer reports the race on every run. The flags are relaxed
/// atomics, which arrange this in time but create no ordering.
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

  std::int64_t count() const { return count_; }

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

int main(int argc, char** argv) {
  using namespace gpipe;
  const Layout layout{2, 1, {0, 1}};
  const bool edge = argc > 1 && argv[1] == std::string("edge");
  const auto program = Program::make(layout, edge ? std::vector<Edge>{{0, 1, ""}} : std::vector<Edge>(), fill(layout));
  Counter counter;
  const auto failure = Executor(2).run(program, Part::kAll, counter);
  return !failure && counter.count() == 2 ? 0 : 1;
}
