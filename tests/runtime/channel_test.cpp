#include "gpipe/runtime/channel.h"

#include <gtest/gtest.h>

#include <thread>
#include <vector>

namespace gpipe {
namespace {

TEST(Channel, PutHappensBeforeTake) {
  constexpr int kCount = 2000;
  Channel channel(kCount);
  std::vector<int> data(kCount, 0);
  std::thread producer([&] {
    for (int m = 0; m < kCount; ++m) {
      data[m] = m + 1;
      channel.put(m);
    }
  });
  long sum = 0;
  for (int m = 0; m < kCount; ++m) {
    ASSERT_TRUE(channel.take(m));
    sum += data[m];
  }
  producer.join();
  EXPECT_EQ(sum, kCount * (kCount + 1L) / 2);
}

TEST(Channel, CancelReleasesAConsumerAndEveryTakeFailsThen) {
  Channel channel(2);
  std::thread consumer([&] { EXPECT_FALSE(channel.take(1)); });
  channel.put(0);
  channel.cancel();
  consumer.join();
  channel.cancel();
  EXPECT_FALSE(channel.take(0));
  EXPECT_FALSE(channel.take(1));
}

}  // namespace
}  // namespace gpipe
