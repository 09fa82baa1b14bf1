// The device itself finds mistakes. GeneratedOnDevices compares its operators with the CPU's.
#include "tests/accelerator/device.h"

#include <torch/torch.h>

#include "gpipe/tensors/transfer.h"
#include "tests/support/matchers.h"

namespace gpipe::accelerator {
namespace {

class CheckedDevice : public ::testing::Test {
 protected:
  void SetUp() override { stream_order().take_violations(); }

  // A stream that has waited for nothing.
  c10::Stream other_stream(int index) { return *new_stream(device(index)); }
};

TEST_F(CheckedDevice, RefusesTensorsOfTwoDevices) {
  const auto here = torch::ones({4}, device(0));
  const auto there = torch::zeros({4}, device(1)).to(torch::kLong);
  EXPECT_THAT([&] { here + there; }, ThrowsMessage<c10::Error>(HasSubstr("on the same device")));
  EXPECT_THAT(
      [&] { here.index_select(0, there); },
      ThrowsMessage<c10::Error>(HasSubstr("aten::index_select takes a tensor of checked:0 and one of checked:1")));
  EXPECT_THAT([&] { here.gather(0, there.cpu()); },
              ThrowsMessage<c10::Error>(HasSubstr("aten::gather takes a tensor of checked:0 and one of the CPU")));
  EXPECT_TRUE((here + torch::tensor(1.)).defined()) << "a number may be on the CPU";
}

TEST_F(CheckedDevice, RefusesAnEventOfAnotherDevice) {
  c10::Event event(kType);
  event.record(other_stream(0));
  EXPECT_THAT([&] { event.record(other_stream(1)); }, ThrowsMessage<c10::Error>(HasSubstr("an event of device 0")));
}

TEST_F(CheckedDevice, AHostThatReadsItsMemoryCrashes) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto tensor = torch::ones({4}, device(0));
  EXPECT_DEATH(volatile float read = *tensor.data_ptr<float>(); (void)read, "");
}

TEST_F(CheckedDevice, FindsAMissingWait) {
  const auto x = torch::ones({4}, device(0));
  const c10::OptionalStreamGuard scope(other_stream(0));
  x.square();
  EXPECT_THAT(stream_order().take_violations(),
              ElementsAre(HasSubstr("aten::pow reads a tensor of shape [4] on stream")));
}

TEST_F(CheckedDevice, FindsMemoryThatIsFreedTooEarly) {
  auto x = torch::ones({4}, device(0));
  const auto made = record_event(device(0));
  {
    const c10::OptionalStreamGuard scope(other_stream(0));
    wait(made, device(0));
    x.square();
    x = torch::Tensor();
  }
  EXPECT_THAT(stream_order().take_violations(), ElementsAre(HasSubstr("memory returns to stream 0 of device 0")));
}

TEST_F(CheckedDevice, ACopyToPinnedMemoryHasItsValuesWhenTheHostHasWaited) {
  const auto copy = torch::ones({4}, device(0)).to(torch::kCPU, /*non_blocking=*/true);
  const auto copied = record_event(device(0));
  EXPECT_TRUE(copy.isnan().all().item<bool>());
  copied->synchronize();
  EXPECT_TRUE(copy.equal(torch::ones({4})));
}

}  // namespace
}  // namespace gpipe::accelerator
