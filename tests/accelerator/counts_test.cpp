// What a step asks of the devices. docs/design.md has the numbers.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gpipe/base/clock.h"
#include "gpipe/timeline.h"
#include "tests/accelerator/actions.h"
#include "tests/accelerator/device.h"
#include "tests/gpipe/helpers.h"
#include "tests/gpipe/layers.h"

namespace gpipe {
namespace {

using accelerator::device;
using accelerator::stream_order;

constexpr int kChunks = 4;

class CountsTest : public ::testing::Test {
 protected:
  /// Counts what one call of `step` asks for, after two others. By stage and kind of action, such as "1F"; "" for the
  /// caller.
  static std::map<std::string, accelerator::Counts> counts(const std::function<void()>& step) {
    for (int i = 0; i < 2; ++i) step();
    stream_order().take_counts();
    const accelerator::ActionListener listener;
    step();
    std::map<std::string, accelerator::Counts> sums;
    for (const auto& [action, count] : stream_order().take_counts()) {
      auto& sum = sums[action.substr(0, 2)];
      for (const auto member : {&accelerator::Counts::copies, &accelerator::Counts::events, &accelerator::Counts::waits,
                                &accelerator::Counts::host_waits}) {
        sum.*member += count.*member;
      }
    }
    return sums;
  }

  static int host_waits(const std::map<std::string, accelerator::Counts>& counts) {
    int sum = 0;
    for (const auto& [action, count] : counts) sum += count.host_waits;
    return sum;
  }

  static GPipe pipe(const std::vector<torch::Device>& devices, Checkpoint checkpoint) {
    const Sequential model(Linear(6, 6), Stash("skip"), Linear(6, 6), Linear(6, 6), Pop("skip"), Linear(6, 6));
    return GPipe(model, Balance{2, 1, 3},
                 GPipeOptions().devices(devices).chunks(kChunks).checkpoint(checkpoint).intraop_threads(1));
  }
};

TEST_F(CountsTest, TheHostNeverWaitsForADevice) {
  for (const auto checkpoint : kModes) {
    auto it = pipe({device(0), device(1), device(2)}, checkpoint);
    const auto x = torch::ones({8, 6}, device(0)).requires_grad_();
    const auto target = torch::zeros({8, 6}, device(2));
    const auto loss = tensor_loss([](const Tensor& output, const Tensor& t) { return (output - t).square().mean(); });
    EXPECT_EQ(host_waits(counts([&] { it->forward(x).sum().backward(); })), 0);
    EXPECT_EQ(host_waits(counts([&] { it->step(x, target, loss); })), 0);
  }
}

TEST_F(CountsTest, TheWorkersOfATracedCallWaitForTheirDevicesAtItsEnd) {
  auto it = pipe({device(0), torch::kCPU, device(2)}, Checkpoint::kAlways);
  const auto x = torch::ones({8, 6}, device(0));
  const auto timeline = std::make_shared<Timeline>();
  const auto untraced = [&] { it->forward(x).sum().backward(); };
  const int copies_from_devices = host_waits(counts(untraced));
  it->trace(timeline);
  const auto before = now();
  EXPECT_EQ(host_waits(counts(untraced)), copies_from_devices + 2 /*waits*/ * 2 /*workers*/ * 2 /*parts*/);
  const auto after = now();
  ASSERT_EQ(timeline->spans.size(), 3u * (3 /*stages*/ * 3 /*F, R, B*/ * kChunks));
  std::map<int, double> ends;
  for (const auto& span : timeline->spans) {
    EXPECT_GE(span.start, before);
    EXPECT_GE(span.end, span.start);
    EXPECT_LE(span.end, after);
    EXPECT_GE(span.start, std::exchange(ends[span.worker], span.end)) << "a worker's actions run in turn";
    EXPECT_GT(span.bytes.peak, 0);
  }
}

TEST_F(CountsTest, OneEventAndOneWaitPerEdgeAndMicroBatchOnOneDevice) {
  auto it = pipe({device(0), device(0), device(0)}, Checkpoint::kNever);
  const auto x = torch::ones({8, 6}, device(0));
  auto got = counts([&] { it->forward(x).sum().backward(); });
  EXPECT_EQ(got["0F"].events, 2 * kChunks) << "to the next stage, and the skip";
  EXPECT_EQ(got["1F"].events, kChunks);
  EXPECT_EQ(got["1F"].waits, kChunks);
  EXPECT_EQ(got["2F"].waits, 2 * kChunks);
  EXPECT_EQ(got["2B"].copies, 0);
}

TEST_F(CountsTest, ACopyTakesAnEventAndAWaitMore) {
  auto it = pipe({device(0), device(1), device(2)}, Checkpoint::kNever);
  const auto x = torch::ones({8, 6}, device(0));
  auto got = counts([&] { it->forward(x).sum().backward(); });
  EXPECT_EQ(got["1F"].copies, kChunks);
  EXPECT_EQ(got["1F"].events, 2 * kChunks);
  EXPECT_EQ(got["1F"].waits, 2 * kChunks);
  EXPECT_EQ(got["2F"].copies, 2 * kChunks);
  EXPECT_EQ(got["2F"].waits, 4 * kChunks);
}

TEST_F(CountsTest, StagesOfOneWorkerAskForNothing) {
  const Sequential model(Linear(6, 6), Stash("skip"), Linear(6, 6), Pop("skip"), Linear(6, 6));
  GPipe it(model, Balance{2, 3},
           GPipeOptions().devices({device(0)}).stages_per_worker(2).chunks(kChunks).checkpoint(Checkpoint::kNever));
  const auto x = torch::ones({8, 6}, device(0));
  auto got = counts([&] { it->forward(x).sum().backward(); });
  EXPECT_EQ(got["0F"].events, 0);
  EXPECT_EQ(got["1F"].waits, 0);
  EXPECT_EQ(got["1B"].events, 0);
}

}  // namespace
}  // namespace gpipe
