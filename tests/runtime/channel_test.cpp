#include "gpipe/runtime/executor.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>

namespace gpipe {
namespace {

TEST(Channel, TakeWaitsForThePut) {
  Channel channel(2);
  std::atomic<bool> waits = false;
  bool was_put = false;
  std::thread consumer([&] {
    waits = true;
    EXPECT_TRUE(channel.take(1));
    EXPECT_TRUE(was_put);
  });
  while (!waits) std::this_thread::yield();
  channel.put(0);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  was_put = true;
  channel.put(1);
  consumer.join();
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
