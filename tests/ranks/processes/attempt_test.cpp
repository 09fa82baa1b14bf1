// The ranks of each attempt get a name of their own, whatever earlier attempts left in the store.

#include "gpipe/ranks/attempt.h"

#include <gtest/gtest.h>

#include <set>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <vector>

#include "tests/gpipe/helpers.h"

namespace gpipe {
namespace {

using std::chrono::milliseconds;

/// Names an attempt on all ranks, which come in this order, a while one after the other.
std::vector<std::string> attempt(c10d::Store& store, const std::vector<int>& order) {
  std::vector<std::string> names(order.size());
  std::vector<std::thread> threads;
  for (const int rank : order) {
    threads.emplace_back([&, rank] {
      names[rank] = name_attempt(store, rank, static_cast<int>(order.size()), std::chrono::seconds(20), nullptr);
    });
    std::this_thread::sleep_for(milliseconds(20));
  }
  for (auto& thread : threads) thread.join();
  return names;
}

TEST(Attempt, HasANameOfItsOwn) {
  c10d::HashStore store;
  std::set<std::string> seen;
  for (const auto& order : std::vector<std::vector<int>>{{0, 1, 2}, {2, 1, 0}, {1, 0, 2}, {0, 2, 1}}) {
    const auto names = attempt(store, order);
    for (const auto& name : names) EXPECT_EQ(name, names[0]);
    EXPECT_TRUE(seen.insert(names[0]).second) << names[0];
  }
}

TEST(Attempt, IgnoresRanksThatCameBefore) {
  c10d::HashStore store;
  // Ranks 1 and 2 come and die before rank 0 comes, and rank 0 before rank 2.
  EXPECT_THAT([&] { name_attempt(store, 1, 3, milliseconds(30), nullptr); }, throws<std::runtime_error>("rank 0"));
  EXPECT_THAT([&] { name_attempt(store, 2, 3, milliseconds(30), nullptr); }, throws<std::runtime_error>("rank 0"));
  EXPECT_THAT([&] { name_attempt(store, 0, 3, milliseconds(50), nullptr); }, throws<std::runtime_error>(": 1, 2"));
  const auto names = attempt(store, {1, 2, 0});
  EXPECT_EQ(names[0], names[1]);
  EXPECT_EQ(names[0], names[2]);
}

TEST(Attempt, CanBeInterrupted) {
  c10d::HashStore store;
  for (const int rank : {0, 1}) {
    EXPECT_THROW(name_attempt(store, rank, 2, std::chrono::seconds(20), [] { throw std::domain_error("stop"); }),
                 std::domain_error);
  }
}

}  // namespace
}  // namespace gpipe
