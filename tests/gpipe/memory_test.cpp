// The bytes that a step allocates, counted on the workers and compared with the simulator's. The graphs that are alive.
#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include "balance/profiler.h"
#include "balance/stage_cost.h"
#include "gpipe/simulator.h"
#include "models/unet.h"
#include "tests/gpipe/instruments.h"
#include "tests/gpipe/layers.h"

namespace gpipe {
namespace {

namespace nn = torch::nn;

constexpr std::int64_t kSamples = 2;  // per micro-batch

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
    return GPipe(model_, balance_, in_chunks(chunks, checkpoint).intraop_threads(1));
  }

  void step(GPipe& pipe, std::int64_t samples) {
    take_gradients(*model_);
    pipe->forward(sample(samples)).sum().backward();
  }

  /// Traces steps after two others, in which the pipeline learns whether stages change their inputs in place.
  Timeline trace(Checkpoint checkpoint, std::int64_t chunks) {
    auto pipe = make(checkpoint, chunks);
    for (int i = 0; i < 2; ++i) step(pipe, chunks * kSamples);
    const auto timeline = std::make_shared<Timeline>();
    pipe->trace(timeline);
    for (int i = 0; i < 3; ++i) step(pipe, chunks * kSamples);
    return *timeline;
  }

  Tensor sample(std::int64_t samples) const {
    auto sizes = shape_;
    sizes.insert(sizes.begin(), samples);
    return torch::randn(sizes);
  }
  void expect_at_most_what_the_simulator_predicts();

  nn::Sequential model_ = models::unet(models::UNetOptions().base_channels(4).depth(3).dropout(0.1));
  std::vector<std::int64_t> balance_ = {20, 25, static_cast<std::int64_t>(model_->size()) - 45};
  std::vector<std::int64_t> shape_ = {3, 32, 32};
};

void StepMemory::expect_at_most_what_the_simulator_predicts() {
  const auto of_model = profile(model_, sample(kSamples), ProfileOptions().seconds(0).repeats(1));
  const auto cells = StageCost(of_model).costs(balance_, {}).bytes;
  for (const auto checkpoint : kModes) {
    for (const int chunks : {1, 5}) {
      SCOPED_TRACE(to_string(checkpoint) + " with " + std::to_string(chunks) + " chunks");
      const auto counted = trace(checkpoint, chunks);
      auto accounted = counted;
      account(accounted, cells);
      ASSERT_EQ(counted.spans.size(), accounted.spans.size());
      for (std::size_t i = 0; i < counted.spans.size(); ++i) {
        const auto& span = counted.spans[i];
        EXPECT_LE(span.bytes.before, accounted.spans[i].bytes.before) << to_string(span.action);
        EXPECT_LE(span.bytes.peak, accounted.spans[i].bytes.peak) << to_string(span.action);
        EXPECT_LE(span.bytes.after, accounted.spans[i].bytes.after) << to_string(span.action);
      }
    }
  }
}

TEST_F(StepMemory, IsAtMostWhatTheSimulatorPredicts) { expect_at_most_what_the_simulator_predicts(); }

// The first and the last stage share a matrix of 256 KiB.
TEST_F(StepMemory, OfTiedParametersIsAtMostWhatTheSimulatorPredicts) {
  nn::Linear first(256, 256);
  Sharer tied(first->weight, [](const Tensor& x, const Tensor& matrix) { return x.matmul(matrix); });
  model_ = nn::Sequential(first, nn::Tanh(), nn::Linear(256, 256), nn::Tanh(), tied, nn::Tanh());
  balance_ = {2, 2, 2};
  shape_ = {256};
  expect_at_most_what_the_simulator_predicts();
}

// Three layers read a skip of 32 KiB. The second one saves it for its backward.
TEST_F(StepMemory, OfASkipWithManyReadersIsAtMostWhatTheSimulatorPredicts) {
  using Names = Skippable::Names;
  const SkipFunction wide(Names{.stash = {"s"}}, [](Tensor x, SkipFunctionImpl& self) {
    self.stash("s", x.repeat({1, 16}));
    return x * 1.5;
  });
  const auto reader = [](Names names, bool saves) {
    return SkipFunction(std::move(names), [=](const Tensor& x, SkipFunctionImpl& self) {
      const auto skip = self.pops().empty() ? self.peek("s") : self.pop("s");
      return x + (saves ? skip * skip : skip * 2).narrow(1, 0, 256).contiguous();
    });
  };
  const auto first = reader(Names{.peek = {"s"}}, false);
  const auto second = reader(Names{.peek = {"s"}}, true);
  const auto last = reader(Names{.pop = {"s"}}, false);
  const auto linear = [] { return nn::Linear(256, 256); };
  model_ = nn::Sequential(linear(), wide, linear(), first, linear(), second, linear(), last, linear());
  shape_ = {256};
  for (const auto& balance : {Balance{2, 4, 3}, Balance{4, 2, 3}}) {
    SCOPED_TRACE(testing::PrintToString(balance));
    balance_ = balance;
    expect_at_most_what_the_simulator_predicts();
  }
}

TEST_F(StepMemory, HoldsOnlyGradientsAfterAStep) {
  for (const auto checkpoint : kModes) {
    auto pipe = make(checkpoint, 4);
    for (int i = 0; i < 3; ++i) {
      take_gradients(*model_);
      const auto total = std::make_shared<Total>();
      const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, total);
      step(pipe, 4 * kSamples);
      EXPECT_EQ(total->live, 4 * parameter_count(model_));
    }
  }
}

}  // namespace
}  // namespace gpipe
