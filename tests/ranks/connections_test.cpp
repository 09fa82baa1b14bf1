#include <thread>

#include "gpipe/mesh.h"
#include "tests/ranks/ends.h"

namespace gpipe::testing {
namespace {

// Generated jobs carry messages of many sizes, and end with a rank.

constexpr Topic kTopic{1, 2};

/// Connected ranks.
struct Ranks {
  explicit Ranks(int count) {
    auto sockets = connect_all(count);
    for (int r = 0; r < count; ++r) {
      ends.push_back(std::make_unique<Connections>(count, allocate));
      descriptors.emplace_back();
      for (const auto& socket : sockets[r]) descriptors.back().push_back(socket.get());
      add_all(*ends.back(), r, std::move(sockets[r]));
    }
  }
  /// Waits until a rank knows of a failure.
  std::string failure(int rank) {
    for (const auto end = end_after(kLongLimit); std::chrono::steady_clock::now() < end;) {
      if (auto failure = ends[rank]->failure(); !failure.empty()) return failure;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return "none";
  }

  std::vector<std::vector<int>> descriptors;
  std::vector<std::unique_ptr<Connections>> ends;
};

TEST(Connections, ReleaseWhatIsSent) {
  Ranks ranks(2);
  std::weak_ptr<const void> owner;
  for (int i = 0; i < 20; ++i) {
    auto sent = message({std::string(200'000, static_cast<char>(i))});
    owner = sent.owner;
    ranks.ends[0]->send(1, kTopic, std::move(sent));
  }
  for (int i = 0; i < 20; ++i) {
    EXPECT_EQ(strings(ranks.ends[1]->receive(0, kTopic, kLongLimit, nullptr)).at(0).back(), static_cast<char>(i));
  }
  EXPECT_FALSE(ranks.ends[1]->has_come(0, kTopic));
  ranks.ends[0] = nullptr;
  EXPECT_TRUE(owner.expired());
}

TEST(Connections, PollWhileTheyWaitAndNameTheRankThatIsLate) {
  Ranks ranks(2);
  int polls = 0;
  const auto receive = [&](const Poll& poll, std::chrono::milliseconds limit = kLongLimit) {
    return ranks.ends[0]->receive(1, kTopic, limit, poll).text;
  };
  EXPECT_THROW(receive([&] {
                 if (++polls == 3) throw std::domain_error("stop");
               }),
               std::domain_error);
  EXPECT_THAT([&] { receive(nullptr, kShortLimit); }, throws<TimeoutError>("rank 1 did not answer in time"));
  ranks.ends[1]->send(0, kTopic, {.text = "word"});
  EXPECT_EQ(receive([&] { EXPECT_FALSE(ranks.ends[0]->has_come(1, {1, 3})); }), "word");
  ranks.ends[1]->send(0, kTopic, {.text = "first"});
  ranks.ends[1]->send(0, kTopic, {.text = "second"});
  ranks.ends[1]->send(0, {1, 3}, {.text = "other"});
  EXPECT_EQ(ranks.ends[0]->receive(1, {1, 3}, kLongLimit, nullptr).text, "other");
  EXPECT_TRUE(ranks.ends[0]->has_come(1, kTopic));
}

TEST(Connections, DropWhatComesForAnEndedPipeline) {
  Ranks ranks(2);
  ranks.ends[0]->send(1, {3, 0}, message({"early"}));
  ranks.ends[0]->send(1, {4, 0}, message({"other"}));
  ranks.ends[1]->receive(0, {4, 0}, kLongLimit, nullptr);
  ranks.ends[1]->end(3);
  ranks.ends[0]->send(1, {3, 0}, message({"late"}));
  ranks.ends[0]->send(1, {4, 0}, message({"other"}));
  ranks.ends[1]->receive(0, {4, 0}, kLongLimit, nullptr);
  EXPECT_THROW(ranks.ends[1]->receive(0, {3, 0}, kShortLimit, nullptr), TimeoutError);
}

/// Also behind a message that the network does not take at once, and if the connection between two ranks is lost later.
TEST(ConnectionsFailure, TheFirstCauseReachesAllRanks) {
  for (const int count : {2, 3}) {  // of two ranks, no other passes the cause on
    Ranks ranks(count);
    std::thread waits([&] { EXPECT_THROW(ranks.ends[1]->receive(0, kTopic, kLongLimit, nullptr), ConnectionError); });
    ranks.ends[0]->send(1, {1, 9}, message({std::string(20'000'000, 'x')}));
    ranks.ends[0]->fail("rank 0 failed");
    ranks.ends[0]->fail("again");
    for (int r = 0; r < count; ++r) EXPECT_EQ(ranks.failure(r), "rank 0 failed");
    for (int r = 0; r < count; ++r) EXPECT_EQ(ranks.ends[r]->is_own(), r == 0);
    waits.join();
    EXPECT_THROW(ranks.ends[0]->send(1, kTopic, {}), ConnectionError);
    EXPECT_THROW(ranks.ends[0]->receive(1, kTopic, kLongLimit, nullptr), ConnectionError);
  }
}

TEST(ConnectionsFailure, IsToldToALateRankAndOnce) {
  Connections ends[] = {{2, allocate}, {2, allocate}};
  int calls = 0;
  ends[0].on_failure([&] { ++calls; });
  ends[0].fail("no memory");
  ends[0].fail("again");
  EXPECT_EQ(calls, 1);
  auto sockets = connect_all(2);
  for (const int r : {0, 1}) add_all(ends[r], r, std::move(sockets[r]));
  EXPECT_THROW(ends[1].receive(0, kTopic, kLongLimit, nullptr), ConnectionError);
  EXPECT_THAT([&] { ends[1].check("no call is possible"); },
              throws<std::runtime_error>("[gpipe] no call is possible: no memory"));
}

TEST(ConnectionsFailure, IsNoEndOfARankThatLeaves) {
  Ranks ranks(2);
  for (const int r : {0, 1}) ranks.ends[r]->begin_to_leave();
  ranks.ends[1] = nullptr;
  EXPECT_THROW(ranks.ends[0]->receive(1, kTopic, kLongLimit, nullptr), ConnectionError);
  EXPECT_EQ(ranks.ends[0]->failure(), "");
}

/// Bytes that no rank sends.
TEST(ConnectionsFailure, OtherBytesAreRefused) {
  struct Frame {
    std::uint64_t kind;
    std::int32_t pipeline, number;
    std::uint64_t bytes, label;
  };
  const auto bytes = [](const Frame& frame, const std::string& text = "") {
    return std::string(reinterpret_cast<const char*>(&frame), sizeof frame) + text;
  };
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"GET / HTTP/1.1\r\nHost: a host with a long name\r\n", "rank 1 sent bytes that are no message"},
      {bytes({0x67706d02, 1, 2, 3, 0}, "5 x"), "the layout is malformed: 5 x"}};
  for (const auto& [sent, cause] : cases) {
    Ranks ranks(2);
    ASSERT_EQ(::send(ranks.descriptors[1][0], sent.data(), sent.size(), 0), sent.size());
    EXPECT_THAT(ranks.failure(0), HasSubstr(cause));
    EXPECT_THROW(ranks.ends[0]->receive(1, kTopic, kLongLimit, nullptr), ConnectionError);
  }
}

TEST(RanksOfWorkers, AreContiguousBlocksAsEqualAsPossible) {
  for (int workers = 1; workers <= 12; ++workers) {
    for (int ranks = 1; ranks <= workers; ++ranks) {
      const auto of_workers = Mesh{ranks}.ranks_of_workers(workers, 0);
      ASSERT_EQ(of_workers.size(), workers);
      EXPECT_TRUE(std::is_sorted(of_workers.begin(), of_workers.end()));
      for (int r = 0; r < ranks; ++r) {
        const auto count = std::count(of_workers.begin(), of_workers.end(), r);
        EXPECT_TRUE(count == workers / ranks || count == (workers + ranks - 1) / ranks) << count;
      }
    }
  }
}

}  // namespace
}  // namespace gpipe::testing
