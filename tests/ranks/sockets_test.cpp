#include "gpipe/ranks/sockets.h"

#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <random>
#include <thread>

#include "gpipe/ranks/handshake.h"
#include "tests/ranks/fake_connections.h"
#include "tests/support/matchers.h"

namespace gpipe::testing {
namespace {

using Memory = std::vector<std::byte>;
using Losses = std::vector<std::pair<int, std::string>>;

/// Memory that follow from the numbers.
Memory bytes(std::size_t size, int seed) {
  Memory made(size);
  for (std::size_t i = 0; i < size; ++i) made[i] = static_cast<std::byte>(seed + i * 7);
  return made;
}

Socket listen_somewhere() {
  return Socket([] { return listen_at(/*rank=*/0, "127.0.0.1", /*port=*/0); });
}

/// Connects to an endpoint.
Socket visit(const Endpoint& to) {
  Socket made([] { return socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0); });
  EXPECT_EQ(connect(made.get(), to.any(), to.size), 0);
  return made;
}

/// Ranks that listen.
struct Listening {
  explicit Listening(int ranks) {
    const auto secret = make_secret();
    for (int r = 0; r < ranks; ++r) {
      listeners.push_back(listen_somewhere());
      endpoints.push_back(Endpoint::of(listeners.back().get()));
    }
    for (int r = 0; r < ranks; ++r) jobs.push_back({r, secret, endpoints});
  }
  std::vector<Socket> connect(int rank, std::chrono::milliseconds limit = kLongLimit, const Poll& poll = nullptr) {
    return connect_ranks(std::move(listeners[rank]), jobs[rank], limit, poll, [&](const ConnectionError&) {
      visit(endpoints[rank]);  // which listens until the error is reported
    });
  }

  std::vector<Socket> listeners;
  std::vector<Endpoint> endpoints;
  std::vector<JobAddresses> jobs;
};

/// Connects all ranks, and calls `run` on a thread per rank.
void on_ranks(int ranks, const std::function<void(int rank, std::vector<Socket> sockets)>& run) {
  Listening listening(ranks);
  std::vector<std::thread> threads;
  for (int r = 0; r < ranks; ++r) threads.emplace_back([&, r] { run(r, listening.connect(r)); });
  for (auto& thread : threads) thread.join();
}

/// Two connected ranks in this process.
struct TwoRanks {
  TwoRanks() {
    on_ranks(2, [&](int rank, std::vector<Socket> sockets) {
      descriptors[rank] = sockets[1 - rank].get();
      ends[rank] = connections_over(std::move(sockets), [this, rank](int lost, const std::string& cause) {
        const std::lock_guard lock(mutex);
        losses[rank].emplace_back(lost, cause);
        changed.notify_all();
      });
    });
  }
  Losses await_loss(int rank) {
    std::unique_lock lock(mutex);
    changed.wait_for(lock, kLongLimit, [&] { return !losses[rank].empty(); });
    return losses[rank];
  }

  std::mutex mutex;
  std::condition_variable changed;
  Losses losses[2];
  std::unique_ptr<Connections> ends[2];
  int descriptors[2];
};

TEST(Sockets, CarryMessagesOfAllSizesInTheOrderOfEachTag) {
  constexpr int kRanks = 3;
  constexpr int kTags = 5;
  constexpr int kMessages = 40;
  const auto size_of = [](int from, int to, int tag, int i) -> std::size_t {
    constexpr std::size_t kSizes[] = {0, 1, 100, kMostEarly, kMostEarly + 1, 70'000, 3'000'000};
    return kSizes[static_cast<std::size_t>(from * 5 + to * 3 + tag * 11 + i * 13) % (i % 10 == 0 ? 7 : 6)];
  };
  on_ranks(kRanks, [&](int rank, std::vector<Socket> sockets) {
    const auto ends = connections_over(std::move(sockets), [](int, const std::string&) {});
    std::vector<std::thread> threads;
    for (int other = 0; other < kRanks; ++other) {
      for (int tag = 0; tag < kTags && other != rank; ++tag) {
        threads.emplace_back([&, other, tag] {
          for (int i = 0; i < kMessages; ++i) {
            auto owner = std::make_shared<Memory>(bytes(size_of(rank, other, tag, i), tag + i));
            ends->send(other, tag, *owner, owner);
          }
        });
        threads.emplace_back([&, other, tag] {
          std::mt19937 random(tag);
          std::deque<std::pair<Memory, std::shared_ptr<Transfer>>> posted;
          for (int i = 0, received = 0; received < kMessages;) {
            for (; i < kMessages && posted.size() < random() % 4 + 1; ++i) {
              auto& [memory, transfer] = posted.emplace_back();
              memory.resize(size_of(other, rank, tag, i) + i % 2);  // may be longer
              transfer = ends->receive(other, tag, memory);
            }
            posted.front().second->wait(kLongLimit, nullptr);
            const auto sent = bytes(size_of(other, rank, tag, received), tag + received);
            ASSERT_TRUE(std::equal(sent.begin(), sent.end(), posted.front().first.begin())) << tag << " " << received;
            posted.pop_front();
            ++received;
          }
        });
      }
    }
    for (auto& thread : threads) thread.join();
    // No rank closes before all have received.
    for (int other = 0; other < kRanks; ++other) {
      if (other != rank) ends->send(other, kTags, {}, nullptr);
    }
    for (int other = 0; other < kRanks; ++other) {
      if (other != rank) ends->receive(other, kTags, {})->wait(kLongLimit, nullptr);
    }
  });
}

TEST(Sockets, LargeMessagesWaitForTheirReceiveAndLetOthersPass) {
  TwoRanks pair;
  const auto large = std::make_shared<Memory>(bytes(kMostEarly + 1, 1));
  const std::weak_ptr<const void> owner = large;
  auto sent = pair.ends[0]->send(1, /*tag=*/1, *large, large);
  pair.ends[0]->send(1, 1, {}, nullptr);  // keeps its place
  Memory memory(5);
  pair.ends[0]->send(1, 2, std::span(*large).first(5), large)->wait(kLongLimit, nullptr);
  pair.ends[1]->receive(0, 2, memory)->wait(kLongLimit, nullptr);
  EXPECT_FALSE(sent->has_ended());
  EXPECT_THROW(sent->wait(kShortLimit, nullptr), TimeoutError);
  memory.resize(large->size());
  const auto first = pair.ends[1]->receive(0, 1, memory);
  const auto second = pair.ends[1]->receive(0, 1, {});
  second->wait(kLongLimit, nullptr);
  EXPECT_TRUE(first->has_ended());
  EXPECT_EQ(memory, *large);
  sent->wait(kLongLimit, nullptr);
  const_cast<std::shared_ptr<Memory>&>(large).reset();
  EXPECT_TRUE(owner.expired());
}

TEST(Sockets, PollWhileTheyWait) {
  TwoRanks pair;
  int polls = 0;
  const auto receive = pair.ends[0]->receive(1, 0, {});
  const auto stop_later = [&] {
    if (++polls == 3) throw std::domain_error("stop");
  };
  EXPECT_THROW(receive->wait(kLongLimit, stop_later), std::domain_error);
  pair.ends[1]->send(0, 0, {}, nullptr);
  receive->wait(kLongLimit, nullptr);
}

TEST(Sockets, WhatComesForAnEndedTagIsDropped) {
  TwoRanks pair;
  {
    Memory memory(100'000);
    pair.ends[1]->receive(0, 7, memory);
    pair.ends[1]->receive(0, 8, memory);
    pair.ends[1]->end_tags(7, 9);
  }
  const auto owner = std::make_shared<Memory>(bytes(100'000, 1));
  pair.ends[0]->send(1, 7, *owner, owner)->wait(kLongLimit, nullptr);  // its receive had been announced
  pair.ends[0]->send(1, 8, std::span(*owner).first(3), owner);
  pair.ends[0]->send(1, 9, std::span(*owner).first(3), owner);
  Memory memory(3);
  pair.ends[1]->receive(0, 9, memory)->wait(kLongLimit, nullptr);
  EXPECT_EQ(memory, bytes(3, 1));
}

TEST(Sockets, AnEndedTagStillSends) {
  TwoRanks pair;
  const auto large = std::make_shared<Memory>(bytes(50'000, 3));
  pair.ends[0]->send(1, 7, *large, large);
  pair.ends[0]->end_tags(0, 10);
  Memory memory(50'000);
  pair.ends[1]->receive(0, 7, memory)->wait(kLongLimit, nullptr);
  EXPECT_EQ(memory, *large);
}

TEST(SocketsFailure, TheEndOfARankEndsItsTransfersAndIsToldOnce) {
  TwoRanks pair;
  Memory memory(100'000);
  const auto owner = std::make_shared<Memory>(100'000);
  const auto receive = pair.ends[0]->receive(1, 0, memory);
  const auto send = pair.ends[0]->send(1, 1, *owner, owner);
  pair.ends[1]->send(0, 2, std::span(*owner).first(5), owner)->wait(kLongLimit, nullptr);
  pair.ends[1].reset();
  EXPECT_EQ(pair.await_loss(0), (Losses{{1, ""}}));
  EXPECT_THROW(receive->wait(kLongLimit, nullptr), ConnectionError);
  EXPECT_THROW(send->wait(kLongLimit, nullptr), ConnectionError);
  EXPECT_THROW(pair.ends[0]->send(1, 1, {}, nullptr), ConnectionError);
  EXPECT_THROW(pair.ends[0]->receive(1, 0, memory), ConnectionError);
  pair.ends[0]->receive(1, 2, memory)->wait(kLongLimit, nullptr);  // came before
  EXPECT_EQ(owner.use_count(), 1);
  pair.ends[0]->close();
  EXPECT_EQ(pair.losses[0].size(), 1);
  EXPECT_TRUE(pair.losses[1].empty());
}

TEST(SocketsFailure, AMessageThatIsTooLongIsRefused) {
  for (const bool is_early : {false, true}) {
    TwoRanks pair;
    Memory memory(4);
    std::shared_ptr<Transfer> receive;
    if (!is_early) receive = pair.ends[0]->receive(1, 0, memory);
    const auto owner = std::make_shared<Memory>(5);
    pair.ends[1]->send(0, 0, *owner, owner);
    pair.ends[1]->send(0, 1, {}, nullptr);
    if (is_early) pair.ends[0]->receive(1, 1, {})->wait(kLongLimit, nullptr);
    const auto wait = [&] {
      if (is_early) receive = pair.ends[0]->receive(1, 0, memory);
      receive->wait(kLongLimit, nullptr);
    };
    EXPECT_THAT(wait, throws<std::runtime_error>("rank 1 sent a message of 5 bytes, but at most 4 were due"));
  }
}

TEST(SocketsFailure, OtherBytesAreRefused) {
  TwoRanks pair;
  const auto receive = pair.ends[0]->receive(1, 0, {});
  ASSERT_EQ(::send(pair.descriptors[1], "GET / HTTP/1.1\r\n", 16, 0), 16);
  EXPECT_THAT([&] { receive->wait(kLongLimit, nullptr); }, throws<std::runtime_error>("rank 1 sent bytes that are no"));
  EXPECT_THAT(pair.await_loss(0).at(0).second, HasSubstr("rank 1 sent bytes that are no message"));
}

TEST(Handshake, OutsidersAreClosed) {
  Listening listening(2);
  std::vector<Socket> visitors;
  const auto say = [&](const std::string& words) {
    visitors.push_back(visit(listening.endpoints[0]));
    EXPECT_EQ(send(visitors.back().get(), words.data(), words.size(), MSG_NOSIGNAL), words.size());
  };
  for (int i = 0; i < 300; ++i) visitors.push_back(visit(listening.endpoints[0]));  // say nothing
  say(std::string(8, '\0'));
  say(std::string(36, '\1'));
  say("GET / HTTP/1.1\r\nHost: a host with a long name\r\n\r\n");
  auto almost = listening.jobs[0].secret;
  almost.back() ^= 1;
  say(almost + std::string("\1\0\0\0", 4));
  say(listening.jobs[0].secret + std::string(4, '\xff'));  // a rank that does not exist
  std::vector<Socket> sockets[2];
  std::thread other([&] { sockets[1] = listening.connect(1); });
  sockets[0] = listening.connect(0);
  other.join();
  ASSERT_EQ(send(sockets[0][1].get(), "x", 1, 0), 1);
  char letter = 0;
  EXPECT_EQ(recv(sockets[1][0].get(), &letter, 1, 0), 1);
  for (const auto& visitor : visitors) {
    EXPECT_LE(recv(visitor.get(), &letter, 1, 0), 0) << "an outsider got a byte";
  }
  const Socket late([] { return socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0); });
  EXPECT_NE(connect(late.get(), listening.endpoints[0].any(), listening.endpoints[0].size), 0) << "still listens";
}

TEST(Handshake, ARankThatEndsIsNamed) {
  for (const int culprit : {0, 1, 2}) {
    Listening listening(3);
    std::mutex mutex;
    std::vector<int> lost_ranks;  // a rank that has noticed ends too
    std::vector<std::thread> threads;
    for (int r = 0; r < 3; ++r) {
      if (r == culprit) continue;
      threads.emplace_back([&, r] {
        try {
          listening.connect(r, kLongLimit, [&] {
            const std::lock_guard lock(mutex);
            if (!lost_ranks.empty()) throw std::domain_error("told");
          });
        } catch (const RankLost& lost) {
          const std::lock_guard lock(mutex);
          lost_ranks.push_back(lost.rank);
        } catch (const std::domain_error&) {
        }
      });
    }
    std::this_thread::sleep_for(kShortLimit);
    listening.listeners[culprit] = Socket();
    for (auto& thread : threads) thread.join();
    EXPECT_EQ(lost_ranks.at(0), culprit);
  }
}

TEST(Handshake, ARankThatDoesNotComeIsNamed) {
  Listening listening(3);
  EXPECT_THAT([&] { listening.connect(0, kShortLimit); }, throws<TimeoutError>("ranks 1, 2 did not connect within"));
  listening.listeners[0] = Socket();
  EXPECT_THROW(listening.connect(1), RankLost);
  Listening others(2);
  EXPECT_THROW(others.connect(1, kLongLimit, [] { throw std::domain_error("stop"); }), std::domain_error);
}

}  // namespace
}  // namespace gpipe::testing
