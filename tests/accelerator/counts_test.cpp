// What pipelines ask of the devices.

#include "gpipe/base/clock.h"
#include "gpipe/gradients.h"
#include "gpipe/timeline.h"
#include "tests/accelerator/device.h"
#include "tests/gpipe/layers.h"

namespace gpipe {
namespace {

using accelerator::device;
using accelerator::stream_order;

constexpr int kChunks = 4;

/// Counts what one call of `step` asks for, after two others. By stage and kind of action, such as "1F"; "" for the
/// caller.
std::map<std::string, accelerator::Counts> counts(const std::function<void()>& step) {
  for (int i = 0; i < 2; ++i) step();
  stream_order().take_counts();
  const auto names = accelerator::name_actions();
  step();
  return stream_order().take_counts();
}

int host_waits(const std::function<void()>& step) {
  int sum = 0;
  for (const auto& [action, count] : counts(step)) sum += count.host_waits;
  return sum;
}

GPipe counted_pipe(const std::vector<torch::Device>& devices, Checkpoint checkpoint, int stages_per_worker = 1) {
  const Sequential model(Linear(6, 6), Stash("skip"), Linear(6, 6), Linear(6, 6), Pop("skip"), Linear(6, 6));
  return GPipe(model, Balance{2, 1, 3},
               GPipeOptions()
                   .devices(devices)
                   .stages_per_worker(stages_per_worker)
                   .chunks(kChunks)
                   .checkpoint(checkpoint)
                   .intraop_threads(1));
}

TEST(Counts, TheHostNeverWaitsForADevice) {
  for (const auto checkpoint : kModes) {
    auto it = counted_pipe({device(0), device(1), device(2)}, checkpoint);
    const auto x = torch::ones({8, 6}, device(0)).requires_grad_();
    const auto target = torch::zeros({8, 6}, device(2));
    EXPECT_EQ(host_waits([&] { it->forward(x).sum().backward(); }), 0);
    EXPECT_EQ(host_waits([&] { it->step(x, target, kMse); }), 0);
    const auto classes = torch::tensor({0, 5, -100, -100, 4, 1, -100, 3}).to(device(2));
    const auto weight = torch::tensor({0.0, 1.0, 2.0, 3.0, 0.5, 0.0}).to(device(2));
    const auto of_classes = tensor_loss(torch::nn::CrossEntropyLoss());
    const auto weighted = tensor_loss(torch::nn::CrossEntropyLoss(torch::nn::CrossEntropyLossOptions().weight(weight)));
    EXPECT_EQ(host_waits([&] { it->step(x, classes, of_classes); }), 0);
    EXPECT_EQ(host_waits([&] { it->step(x, classes, weighted); }), 0);
  }
}

// Of the targets of the micro-batches, 2, 0, 1 and 1 count; those of the last have no weight.
TEST(Counts, StayOnTheDeviceOfTheTarget) {
  const auto classes = torch::tensor({1, 5, -100, -100, 4, -100, 0, -100});
  const auto weight = torch::tensor({0.0, 1.0, 2.0, 3.0, 0.5, 2.0});
  auto it = counted_pipe({device(0), device(1), device(2)}, Checkpoint::kNever);
  const auto x = torch::randn({8, 6}, device(0));
  const auto step = [&](const Tensor& target) {
    const auto options = torch::nn::CrossEntropyLossOptions().weight(weight.to(device(2)));
    auto loss = tensor_loss([loss = torch::nn::CrossEntropyLoss(options)](const Tensor& out, const Tensor& t) mutable {
      return loss(out, t);
    });
    loss.reduction = Reduction::kMean;
    loss.count = count_of_classes(weight.to(target.device()), -100);
    auto results = std::vector<Tensor>{it->step(x, target, loss).loss.cpu()};
    for (const auto& gradient : take_gradients(*it)) results.push_back(gradient.defined() ? gradient.cpu() : gradient);
    return results;
  };
  const auto expected = step(classes);
  EXPECT_TRUE(expected[0].isfinite().item<bool>());
  for (const int of_target : {0, 2}) {
    expect_close(step(classes.to(device(of_target))), expected);
    EXPECT_TRUE(step(torch::full_like(classes, -100).to(device(of_target)))[0].isnan().item<bool>()) << "as PyTorch's";
  }
}

TEST(Counts, CopiesFromTheHostBlockNoWorkerAndAreMadeWhenTheCallReturns) {
  auto it = counted_pipe({device(0), device(1), device(2)}, Checkpoint::kNever);
  const auto input = torch::ones({8, 6});
  const auto target = torch::zeros({8, 6});
  EXPECT_EQ(host_waits([&] { it->step(input, target, kMse); }), 0) << "the copies read other memory";
  auto got = counts([&] { it->step(input.pin_memory(), target.pin_memory(), kMse); });
  EXPECT_EQ(got[""].host_waits, 2) << "for the copies of the input and of the target";
  got.erase("");
  for (const auto& [action, count] : got) EXPECT_EQ(count.host_waits, 0) << action;
}

// The devices' workers enqueue their copies to and from the CPU, and go on.
TEST(Counts, OfWaitsOfAStageOnTheCpuAreItsOwn) {
  auto it = counted_pipe({device(0), torch::kCPU, device(2)}, Checkpoint::kNever);
  const auto x = torch::ones({8, 6}, device(0));
  const auto target = torch::zeros({8, 6}, device(2));
  for (const auto& [action, count] : counts([&] { it->step(x, target, kMse); })) {
    EXPECT_EQ(count.host_waits > 0, action.starts_with("1")) << action;
  }
}

TEST(Counts, TheHostWaitsOncePerDeviceToClipAndToUnscale) {
  auto it = counted_pipe({device(0), device(1), device(2)}, Checkpoint::kNever);
  it->forward(torch::ones({8, 6}, device(0))).sum().backward();
  EXPECT_EQ(host_waits([&] { clip_grad_norm_(*it, 1e-3); }), 3);
  EXPECT_EQ(host_waits([&] { unscale_grads_(*it, 2); }), 3);
}

TEST(Counts, TheWorkersOfATracedCallWaitForTheirDevicesAtItsEnd) {
  auto it = counted_pipe({device(0), device(1), device(2)}, Checkpoint::kAlways);
  const auto x = torch::ones({8, 6}, device(0));
  const auto timeline = std::make_shared<Timeline>();
  const auto call = [&] { it->forward(x).sum().backward(); };
  EXPECT_EQ(host_waits(call), 0);
  it->trace(timeline);
  const auto before = now();
  EXPECT_EQ(host_waits(call), 2 /*waits*/ * 3 /*workers*/ * 2 /*parts*/);
  const auto after = now();
  ASSERT_EQ(timeline->spans.size(), 3u * (3 /*stages*/ * 3 /*F, R, B*/ * kChunks));
  std::map<int, double> ends;
  for (const auto& span : timeline->spans) {
    EXPECT_GE(span.start, before - 1e-3);  // the clocks of devices are compared with the host's once
    EXPECT_GE(span.end, span.start);
    EXPECT_LE(span.end, after + 1e-3);
    EXPECT_GE(span.start, std::exchange(ends[span.worker], span.end)) << "a worker's actions run in turn";
    EXPECT_GT(span.bytes.peak, 0);
  }
}

// Each F and B also records an event, by which the host stays near the device.
TEST(Counts, AnEdgeTakesAnEventAndAWaitPerMicroBatchAndACopyTakesOneMoreOfEach) {
  const auto x = torch::ones({8, 6}, device(0));
  for (const int copies : {0, 1}) {
    auto it = counted_pipe({device(0), device(copies), device(2 * copies)}, Checkpoint::kNever);
    auto got = counts([&] { it->forward(x).sum().backward(); });
    if (copies == 0) EXPECT_EQ(got["0F"].events, (2 + 1) * kChunks) << "to the next stage, and the skip";
    EXPECT_EQ(got["1F"].copies, copies * kChunks);
    EXPECT_EQ(got["1F"].events, (1 + copies + 1) * kChunks);
    EXPECT_EQ(got["1F"].waits, (1 + copies) * kChunks);
    EXPECT_EQ(got["2F"].copies, 2 * copies * kChunks);
    EXPECT_EQ(got["2F"].waits, 2 * (1 + copies) * kChunks);
  }
  auto it = counted_pipe({device(0)}, Checkpoint::kNever, /*stages_per_worker=*/3);
  auto got = counts([&] { it->forward(x).sum().backward(); });
  EXPECT_EQ(got["0F"].events, kChunks);
  EXPECT_EQ(got["1F"].waits, 0);
  EXPECT_EQ(got["1B"].events, kChunks);
}

}  // namespace
}  // namespace gpipe
