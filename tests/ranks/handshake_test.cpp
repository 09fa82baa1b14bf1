#include "gpipe/ranks/handshake.h"

#include <mutex>
#include <thread>

#include "tests/ranks/ends.h"

namespace gpipe::testing {
namespace {

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
  EXPECT_THAT([&] { listening.connect(0, kShortLimit); }, throws<ConnectionError>("rank 1, 2 did not connect within"));
  listening.listeners[0] = Socket();
  EXPECT_THROW(listening.connect(1), RankLost);
  Listening others(2);
  EXPECT_THROW(others.connect(1, kLongLimit, [] { throw std::domain_error("stop"); }), std::domain_error);
}

}  // namespace
}  // namespace gpipe::testing
