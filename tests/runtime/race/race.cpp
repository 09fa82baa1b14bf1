// Two workers count in one plain integer, in a run whose two cells are joined by an edge ("edge"), which orders them,
// or by nothing ("race"), which ThreadSanitizer must report: what it does not report elsewhere is then no race.

#include <atomic>
#include <cstdint>
#include <string>
#include <thread>

#include "gpipe/runtime/executor.h"
#include "gpipe/schedule/generators.h"
#include "tests/schedule/programs.h"

namespace gpipe {
namespace {

/// ThreadSanitizer goes by what is ordered, not by time. So that the edge alone can order the two, worker 0 counts only
/// when worker 1 has been started, and worker 1 waits for nothing afterwards; so that the report does not depend on
/// luck, worker 1 counts when worker 0 has. Relaxed atomics arrange that in time and order nothing.
class Counter : public Cells {
 public:
  void work(int worker, absl::FunctionRef<void()> run_actions) override {
    if (worker == 1) started_.store(true, std::memory_order_relaxed);
    if (worker == 0) await(started_);
    run_actions();
  }

  void run(const Action& action) override {
    if (action.stage == 1) await(counted_);
    ++count_;
    if (action.stage == 0) counted_.store(true, std::memory_order_relaxed);
  }

  std::int64_t count() const { return count_; }

 private:
  static void await(const std::atomic<bool>& flag) {
    while (!flag.load(std::memory_order_relaxed)) std::this_thread::yield();
  }

  /// Alone in its 8 bytes: ThreadSanitizer remembers four accesses to each, and looks at the flags are many.
  std::int64_t count_ = 0;
  std::atomic<bool> started_ = false;
  std::atomic<bool> counted_ = false;
};

}  // namespace
}  // namespace gpipe

int main(int argc, char** argv) {
  using namespace gpipe;
  const auto layout = testing::straight(2, 1);
  const bool edge = argc > 1 && argv[1] == std::string("edge");
  const auto program = testing::make(layout, edge ? testing::chain(2, 1) : std::vector<Edge>(), fill(layout));
  Counter counter;
  const auto failure = Executor(2).run(program, Part::kAll, counter);
  return !failure && counter.count() == 2 ? 0 : 1;
}
