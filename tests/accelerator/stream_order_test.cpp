#include "tests/accelerator/stream_order.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

namespace gpipe::accelerator {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class StreamOrderTest : public ::testing::Test {
 protected:
  void write(int stream, Allocation& allocation) {
    order_.launch(stream, "a write", std::vector<Access>{{&allocation, true, kSizes}});
  }
  void read(int stream, Allocation& allocation) {
    order_.launch(stream, "a read", std::vector<Access>{{&allocation, false, kSizes}});
  }
  // Makes a stream wait for the present work of another.
  void wait(int stream, int other) {
    Event event;
    order_.record(event, other);
    order_.wait(stream, event);
  }

  static constexpr std::int64_t kSizes[] = {2, 3};
  StreamOrder order_;
  const int first_ = order_.index(0, 0);
  const int second_ = order_.index(1, 7);
  Allocation memory_{.home = first_};
};

TEST_F(StreamOrderTest, AStreamRunsItsWorkInOrder) {
  write(first_, memory_);
  read(first_, memory_);
  write(first_, memory_);
  order_.freed(memory_);
  EXPECT_THAT(order_.take_violations(), IsEmpty());
}

TEST_F(StreamOrderTest, AReadMustWaitForTheWrite) {
  write(first_, memory_);
  read(second_, memory_);
  EXPECT_THAT(order_.take_violations(),
              ElementsAre("a read reads a tensor of shape [2, 3] on stream 7 of device 1, which has not waited for a "
                          "write on stream 0 of device 0"));
  EXPECT_THAT(order_.take_violations(), IsEmpty()) << "violations are taken once";
}

TEST_F(StreamOrderTest, AnEventOrdersTheWorkBeforeIt) {
  write(first_, memory_);
  wait(second_, first_);
  read(second_, memory_);
  EXPECT_THAT(order_.take_violations(), IsEmpty());
  write(first_, memory_);  // while the second stream may still read
  EXPECT_THAT(order_.take_violations(), ElementsAre(HasSubstr("which has not waited for a read on stream 7")));
}

TEST_F(StreamOrderTest, AnEventRecordedBeforeTheWorkOrdersNothing) {
  Event early;
  order_.record(early, first_);
  write(first_, memory_);
  order_.wait(second_, early);
  read(second_, memory_);
  EXPECT_THAT(order_.take_violations(), ElementsAre(HasSubstr("a write on stream 0")));
}

TEST_F(StreamOrderTest, OrderIsTransitive) {
  const int third = order_.index(1, 8);
  write(first_, memory_);
  wait(third, first_);
  wait(second_, third);
  read(second_, memory_);
  EXPECT_THAT(order_.take_violations(), IsEmpty());
}

TEST_F(StreamOrderTest, ReadsNeedNoOrder) {
  write(first_, memory_);
  wait(second_, first_);
  read(second_, memory_);
  read(first_, memory_);
  EXPECT_THAT(order_.take_violations(), IsEmpty());
}

TEST_F(StreamOrderTest, AHostThatWaitsOrdersItsOwnLaterWork) {
  write(first_, memory_);
  order_.synchronize(first_);
  std::thread([&] { read(second_, memory_); }).join();
  EXPECT_EQ(order_.take_violations().size(), 1) << "another thread did not wait";
  read(second_, memory_);
  EXPECT_THAT(order_.take_violations(), IsEmpty());
}

TEST_F(StreamOrderTest, MemoryIsFreedAfterItsUses) {
  write(first_, memory_);
  wait(second_, first_);
  read(second_, memory_);
  order_.freed(memory_);
  EXPECT_THAT(order_.take_violations(), ElementsAre(HasSubstr("the allocator was not told")));
  order_.used(memory_, second_);
  order_.freed(memory_);
  EXPECT_THAT(order_.take_violations(), IsEmpty());
}

TEST_F(StreamOrderTest, MemoryIsFreedAfterWorkThatItsStreamWaitedFor) {
  wait(second_, first_);
  write(second_, memory_);
  wait(first_, second_);
  order_.freed(memory_);
  EXPECT_THAT(order_.take_violations(), IsEmpty());
}

TEST_F(StreamOrderTest, CountsByAction) {
  {
    const ActionScope scope("F");
    wait(second_, first_);
  }
  order_.synchronize_device(1);
  const auto counts = order_.take_counts();
  EXPECT_EQ(counts.at("F"), (Counts{.events = 1, .waits = 1}));
  EXPECT_EQ(counts.at(""), Counts{.host_waits = 1});
}

TEST_F(StreamOrderTest, AViolationNamesTheAction) {
  const ActionScope scope("1F0");
  write(first_, memory_);
  read(second_, memory_);
  EXPECT_THAT(order_.take_violations(), ElementsAre(::testing::StartsWith("1F0: a read reads")));
}

}  // namespace
}  // namespace gpipe::accelerator
