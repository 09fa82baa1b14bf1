// The bytes that a step allocates, counted on the workers. tests/balance compares them with those of a profile.
#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include "models/unet.h"
#include "tests/gpipe/instruments.h"

namespace gpipe {
namespace {

/// Counts the bytes allocated and not freed, on this thread and on workers that take over its thread-local state.
class Total : public c10::MemoryReportingInfoBase {
 public:
  void reportMemoryUsage(void*, std::int64_t bytes, std::size_t, std::size_t, c10::Device) override { live += bytes; }
  bool memoryProfilingEnabled() const override { return true; }
  std::atomic<std::int64_t> live = 0;
};

class StepMemory : public testing::Test {
 protected:
  GPipe make(Checkpoint checkpoint, std::int64_t chunks) {
    return GPipe(model, {20, 20, static_cast<std::int64_t>(model->size()) - 40},
                 in_chunks(chunks, checkpoint).intraop_threads(1));
  }
  const Sequential model = models::unet(models::UNetOptions().base_channels(4).depth(3).dropout(0.1));
  const Tensor x = torch::randn({8, 3, 32, 32});
  const std::shared_ptr<Total> total = std::make_shared<Total>();
  const std::shared_ptr<Timeline> timeline = std::make_shared<Timeline>();
};

TEST_F(StepMemory, HoldsOnlyGradientsAfterAStep) {
  for (const auto checkpoint : kModes) {
    auto pipe = make(checkpoint, 4);
    for (int i = 0; i < 3; ++i) {
      take_gradients(*model);
      total->live = 0;
      const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, total);
      pipe->forward(x).sum().backward();
      EXPECT_EQ(total->live, 4 * parameter_count(model));
    }
  }
}

TEST_F(StepMemory, IsNotCountedUnderTheCallersProfiler) {
  auto pipe = make(Checkpoint::kAlways, 2);
  pipe->trace(timeline);
  const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, total);
  const auto output = pipe->forward(x);
  EXPECT_GT(total->live, static_cast<std::int64_t>(output.nbytes()));
  EXPECT_THAT(timeline->peak_bytes(), Each(0));
}

TEST_F(StepMemory, IsCountedForEachBatchInFlight) {
  auto pipe = make(Checkpoint::kNever, 2);
  pipe->trace(timeline);
  const auto first = pipe->forward(x).sum();
  const auto second = pipe->forward(x).sum();
  first.backward();
  second.backward();
  for (const auto& span : timeline->spans) {
    if (span.action.kind == Kind::F && span.action.micro_batch == 0) EXPECT_EQ(span.bytes.before, 0);
    EXPECT_GE(span.bytes.peak, std::max(span.bytes.before, span.bytes.after));
  }
}

}  // namespace
}  // namespace gpipe
