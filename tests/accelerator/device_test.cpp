// The device itself: its operators compute what the CPU's do, and it finds mistakes. GeneratedOnDevices compares more
// operators with the CPU's.
#include "tests/accelerator/device.h"

#include <gmock/gmock.h>
#include <torch/torch.h>

#include <functional>
#include <sstream>
#include <thread>

#include "gpipe/tensors/transfer.h"

namespace gpipe::accelerator {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::ThrowsMessage;
using torch::Device;
using torch::Tensor;

/// Expects a function to return on a device what it returns on the CPU.
void expect_as_on_cpu(const std::function<Tensor(Device)>& run) {
  torch::manual_seed(2);
  const auto expected = run(torch::kCPU);
  torch::manual_seed(2);
  const auto got = run(device(1));
  EXPECT_EQ(got.device(), device(1));
  EXPECT_TRUE(torch::allclose(got.cpu(), expected, 1e-4, 1e-5));
  EXPECT_THAT(stream_order().take_violations(), IsEmpty());
}

class CheckedDevice : public ::testing::Test {
 protected:
  void SetUp() override { stream_order().take_violations(); }

  // A stream that has waited for nothing.
  c10::Stream other_stream(int index) { return *new_stream(device(index)); }
};

TEST_F(CheckedDevice, WritesToViews) {
  expect_as_on_cpu([rows = torch::randn({4, 8})](Device device) {
    auto x = rows.to(device);
    auto y = torch::cat({x.narrow(0, 1, 2), std::get<0>(x.topk(2, 0))});
    y.index_put_({torch::tensor({0, 3}).to(device)}, 3.0);
    y.slice(1, 0, 5).add_(1);
    return y.masked_fill_(y > 1, 0.5).t();
  });
}

TEST_F(CheckedDevice, ResizesResults) {
  expect_as_on_cpu([rows = torch::randn({4, 8})](Device device) {
    auto sum = torch::empty({0}, device);
    at::add_out(sum, rows.to(device), rows.to(device));
    auto both = torch::empty({0}, device);
    at::cat_out(both, {sum, sum});
    both.resize_({80}).slice(0, 64).zero_();
    return both;
  });
}

TEST_F(CheckedDevice, DrawsNumbersOfItsOwn) {
  torch::manual_seed(1);
  const auto first = torch::rand({8}, device(0)).cpu();
  const auto dropped = torch::dropout(torch::ones({1000}, device(0)), 0.5, true).sum().item<double>();
  EXPECT_NEAR(dropped, 1000, 200);
  torch::manual_seed(1);
  EXPECT_TRUE(torch::equal(torch::rand({8}, device(0)).cpu(), first));
}

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
    x = Tensor();
  }
  EXPECT_THAT(stream_order().take_violations(), ElementsAre(HasSubstr("memory returns to stream 0 of device 0")));
}

TEST_F(CheckedDevice, FindsAnUnfinishedCopyToTheHost) {
  torch::ones({4}, device(0)).to(torch::kCPU, /*non_blocking=*/true);
  EXPECT_THAT(stream_order().take_violations(), ElementsAre(HasSubstr("does not block")));
}

/// What streams 0 and 7 of devices 0 and 1 and this host do with an allocation of the first: "r0" and "w0" are a read
/// and a write of the first stream, "1<0" makes the second wait for its work, "h0" makes the host wait, "u1" tells the
/// allocator of the second, "t1" is a read that another host thread launches, and "f" frees the memory.
struct Script {
  std::string name;
  std::string steps;
  std::string violation = "";
};
void PrintTo(const Script& it, std::ostream* out) { *out << it.name; }

const Script kScripts[] = {
    {"AStreamRunsItsWorkInOrder", "w0 r0 w0 f"},
    {"AReadMustWaitForTheWrite", "w0 r1",
     "a read reads a tensor of shape [2, 3] on stream 7 of device 1, which has not waited for a write on stream 0 of "
     "device 0"},
    {"AnEventOrdersTheWorkBeforeIt", "w0 1<0 r1"},
    {"AnEventOrdersNoWorkAfterIt", "1<0 w0 r1", "a write on stream 0"},
    {"AWriteMustWaitForReads", "w0 1<0 r1 w0", "which has not waited for a read on stream 7"},
    {"OrderIsTransitive", "w0 2<0 1<2 r1"},
    {"ReadsNeedNoOrder", "w0 1<0 r1 r0"},
    {"AHostThatWaitsOrdersItsOwnLaterWork", "w0 h0 r1"},
    {"AHostThatWaitsOrdersNoOthersWork", "w0 h0 t1", "a write on stream 0"},
    {"MemoryIsFreedAfterItsUses", "w0 1<0 r1 f", "the allocator was not told"},
    {"TheAllocatorWaitsForStreamsThatItKnows", "w0 1<0 r1 u1 f"},
    {"MemoryIsFreedAfterWorkThatItsStreamWaitedFor", "1<0 w1 0<1 f"}};

class StreamOrderScripts : public ::testing::TestWithParam<Script> {};

TEST_P(StreamOrderScripts, HaveOnlyTheirViolations) {
  constexpr std::int64_t kSizes[] = {2, 3};
  StreamOrder order;
  const int streams[] = {order.index(0, 0), order.index(1, 7), order.index(1, 8)};
  Allocation memory{.home = streams[0]};
  const auto use = [&](int stream, bool writes) {
    order.launch(stream, writes ? "a write" : "a read", std::vector<Access>{{&memory, writes, kSizes}});
  };
  std::istringstream steps(GetParam().steps);
  for (std::string step; steps >> step;) {
    const int stream = step.size() < 2 ? 0 : streams[step[1] == '<' ? step[0] - '0' : step[1] - '0'];
    Clock event;
    switch (step[0]) {
      case 'r':
      case 'w':
        use(stream, step[0] == 'w');
        break;
      case 't':
        std::thread([&] { use(stream, false); }).join();
        break;
      case 'h':
        order.synchronize(stream);
        break;
      case 'u':
        order.used(memory, stream);
        break;
      case 'f':
        order.freed(memory);
        break;
      default:
        order.record(event, streams[step[2] - '0']);
        order.wait(stream, event);
    }
  }
  const auto violations = order.take_violations();
  EXPECT_EQ(violations.empty(), GetParam().violation.empty());
  if (!violations.empty()) EXPECT_THAT(violations, ElementsAre(HasSubstr(GetParam().violation)));
  EXPECT_THAT(order.take_violations(), IsEmpty()) << "violations are taken once";
}

INSTANTIATE_TEST_SUITE_P(All, StreamOrderScripts, ::testing::ValuesIn(kScripts),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace gpipe::accelerator
