#include "gpipe/runtime/channel.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

namespace gpipe {
namespace {

TEST(Channel, TakesInAnyOrder) {
  Channel channel(3, 3);
  for (const int m : {0, 1, 2}) EXPECT_TRUE(channel.put(m));
  for (const int m : {2, 0, 1}) EXPECT_TRUE(channel.take(m));
}

TEST(Channel, PutHappensBeforeTake) {
  constexpr int kCount = 2000;
  for (const int capacity : {1, 3, kCount}) {
    Channel channel(capacity, kCount);
    std::vector<int> data(kCount, 0);
    std::thread producer([&] {
      for (int m = 0; m < kCount; ++m) {
        data[m] = m + 1;
        ASSERT_TRUE(channel.put(m));
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
}

TEST(Channel, NeverHoldsMoreThanItsCapacity) {
  constexpr int kCount = 500;
  constexpr int kCapacity = 2;
  Channel channel(kCapacity, kCount);
  std::atomic<int> put = 0;
  std::thread producer([&] {
    for (int m = 0; m < kCount; ++m) {
      ASSERT_TRUE(channel.put(m));
      ++put;
    }
  });
  for (int m = 0; m < kCount; ++m) {
    EXPECT_LE(put, m + kCapacity);
    ASSERT_TRUE(channel.take(m));
  }
  producer.join();
}

TEST(Channel, CancelReleasesAConsumer) {
  Channel channel(1, 2);
  std::thread consumer([&] { EXPECT_FALSE(channel.take(1)); });
  EXPECT_TRUE(channel.put(0));
  channel.cancel();
  consumer.join();
}

TEST(Channel, CancelReleasesAProducer) {
  Channel channel(1, 2);
  ASSERT_TRUE(channel.put(0));
  std::thread producer([&] { EXPECT_FALSE(channel.put(1)); });
  channel.cancel();
  producer.join();
}

TEST(Channel, EveryCallFailsAfterCancel) {
  Channel channel(2, 2);
  EXPECT_TRUE(channel.put(0));
  channel.cancel();
  channel.cancel();
  EXPECT_FALSE(channel.put(1));
  EXPECT_FALSE(channel.take(0));
  EXPECT_FALSE(channel.take(1));
}

}  // namespace
}  // namespace gpipe
