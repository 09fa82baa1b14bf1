// What trace() records of a step.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <thread>

#include "gpipe/timeline.h"
#include "tests/gpipe/helpers.h"
#include "tests/gpipe/instruments.h"

namespace gpipe {
namespace {

/// Counts up; other threads can wait for a count.
struct Counter {
  void increment() {
    const std::lock_guard<std::mutex> lock(mutex);
    ++value;
    changed.notify_all();
  }
  void wait_for(int wanted) {
    std::unique_lock<std::mutex> lock(mutex);
    TORCH_CHECK(changed.wait_for(lock, std::chrono::seconds(30), [&] { return value >= wanted; }),
                "the count is still ", value, " after 30 seconds, not ", wanted);
  }
  std::mutex mutex;
  std::condition_variable changed;
  int value = 0;
};

/// A linear layer that counts its recomputes.
struct RecomputesImpl : torch::nn::Module {
  explicit RecomputesImpl(std::shared_ptr<Counter> counter)
      : linear(register_module("linear", Linear(6, 6))), counter(std::move(counter)) {}
  Tensor forward(Tensor x) {
    auto y = linear(x);
    if (is_recomputing()) counter->increment();
    return y;
  }
  Linear linear;
  std::shared_ptr<Counter> counter;
};

/// Its n-th backward waits for the n-th count, and then long enough for an action that is about to end.
struct WaitInBackwardImpl : torch::nn::Module {
  explicit WaitInBackwardImpl(std::shared_ptr<Counter> counter) {
    act = [counter = std::move(counter), n = 0]() mutable {
      counter->wait_for(++n);
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    };
  }
  Tensor forward(Tensor x) { return OnBackward::apply(x, &act); }
  std::function<void()> act;
};

// The last stage's backward waits for the recompute, so the order of their ends does not depend on the machine.
TEST(Trace, ShowsARecomputeBeforeItsGradientArrives) {
  auto recomputes = std::make_shared<Counter>();
  Sequential model(std::make_shared<RecomputesImpl>(recomputes), std::make_shared<WaitInBackwardImpl>(recomputes));
  GPipe pipe(model, {1, 1}, GPipeOptions().chunks(3).checkpoint(Checkpoint::kAlways));
  auto timeline = std::make_shared<Timeline>();
  pipe->trace(timeline);
  pipe->forward(torch::randn({6, 6})).sum().backward();
  EXPECT_EQ(timeline->spans.size(), 2U * 3U * 3U) << "F, R and B of two stages and three micro-batches";
  const auto find = [&](Action action) {
    for (const auto& span : timeline->spans) {
      if (span.action == action) return span;
    }
    throw std::logic_error("the timeline has no " + to_string(action));
  };
  for (int i = 0; i < 3; ++i) {
    EXPECT_LT(find({Kind::R, 0, i}).end, find({Kind::B, 1, i}).end) << "micro-batch " << i;
  }
  const auto json = nlohmann::json::parse(to_chrome_json(*timeline));
  EXPECT_FALSE(json.at("traceEvents").empty());
}

TEST(Trace, CoversAForwardThatBeganUnderItAndItsBackward) {
  GPipe pipe(Sequential(Linear(6, 6), Linear(6, 6)), {1, 1}, GPipeOptions().chunks(2));
  const auto step = [&] { return pipe->forward(torch::randn({4, 6})).sum(); };
  const auto before = step();
  auto timeline = std::make_shared<Timeline>();
  pipe->trace(timeline);
  const auto traced = step();
  EXPECT_EQ(timeline->spans.size(), 2U * 2U);
  before.backward();
  pipe->trace(nullptr);
  step().backward();
  EXPECT_EQ(timeline->spans.size(), 2U * 2U);
  traced.backward();
  EXPECT_EQ(timeline->spans.size(), 2U * 2U + 2U * 3U) << "two B and one R per stage";
}

}  // namespace
}  // namespace gpipe
