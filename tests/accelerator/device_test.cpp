// The device itself finds mistakes. GeneratedOnDevices compares its operators with the CPU's.
#include "tests/accelerator/device.h"

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
