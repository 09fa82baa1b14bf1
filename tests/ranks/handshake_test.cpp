#include "gpipe/ranks/handshake.h"

#include <cstring>
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

/// Ranks that are threads.
struct Meeting {
  explicit Meeting(int ranks) : size(ranks) {
    for (int r = 0; r < ranks; ++r) connections.push_back(std::make_unique<Connections>(ranks, allocate));
  }
  std::string connect(int rank, std::chrono::milliseconds limit = kLongLimit, const Poll& poll = nullptr) {
    const auto write = [&](const std::string& text) {
      const std::lock_guard lock(mutex);
      board = text;
    };
    const auto read = [&] {
      const std::lock_guard lock(mutex);
      return board;
    };
    return connect_ranks(*connections[rank], rank, size, listen_somewhere(), {write, read}, limit, kLongLimit, poll);
  }
  /// The same on a thread.
  std::thread start(int rank) {
    return std::thread([this, rank] { EXPECT_NO_THROW(connect(rank)); });
  }
  /// What rank 0 has written.
  std::string invitation() {
    for (;; std::this_thread::sleep_for(std::chrono::milliseconds(1))) {
      const std::lock_guard lock(mutex);
      if (!board.empty()) return board;
    }
  }

  const int size;
  std::mutex mutex;
  std::string board;
  std::vector<std::unique_ptr<Connections>> connections;
};

/// Connects all ranks at once. Expects that each can send to each other one.
void expect_connected(Meeting& meeting) {
  std::vector<std::string> names(meeting.size);
  std::vector<std::thread> threads;
  for (int r = 0; r < meeting.size; ++r) {
    threads.emplace_back([&, r] {
      names[r] = meeting.connect(r);
      for (int other = 0; other < meeting.size; ++other) {
        if (other != r) meeting.connections[r]->send(other, {1, 1}, {.text = std::to_string(r)});
      }
      for (int other = 0; other < meeting.size; ++other) {
        if (other == r) continue;
        EXPECT_EQ(meeting.connections[r]->receive(other, {1, 1}, kLongLimit, nullptr).text, std::to_string(other));
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(names, Strings(meeting.size, names[0]));
}

// Rank 0's invitation, which is what it says first: secret, name, rank, address.
constexpr std::size_t kSecretBytes = 32;
constexpr std::size_t kRankAt = 40;
Endpoint address_in(const std::string& invitation) {
  Endpoint endpoint;
  std::memcpy(&endpoint, invitation.data() + invitation.size() - sizeof endpoint, sizeof endpoint);
  return endpoint;
}

TEST(Handshake, OutsidersAreClosed) {
  Meeting meeting(3);
  auto leader = meeting.start(0);
  const auto invitation = meeting.invitation();
  std::vector<Socket> visitors;
  const auto say = [&](const std::string& words) {
    visitors.push_back(visit(address_in(invitation)));
    EXPECT_EQ(send(visitors.back().get(), words.data(), words.size(), MSG_NOSIGNAL), words.size());
  };
  for (int i = 0; i < 300; ++i) visitors.push_back(visit(address_in(invitation)));  // say nothing
  say(std::string(8, '\0'));
  say(std::string(invitation.size(), '\1'));
  say("GET / HTTP/1.1\r\nHost: a host with a long name\r\n\r\n");
  const auto as_rank = [&](char rank) {
    auto greeting = invitation;
    greeting[kRankAt] = rank;
    return greeting;
  };
  auto almost = as_rank(1);
  almost[kSecretBytes - 1] ^= 1;
  say(almost);
  for (const char rank : {0, 3, -1}) say(as_rank(rank));
  std::vector<std::thread> others;
  for (const int r : {1, 2}) others.push_back(meeting.start(r));
  leader.join();
  for (auto& other : others) other.join();
  for (const auto& visitor : visitors) {
    char letter = 0;
    EXPECT_LE(recv(visitor.get(), &letter, 1, 0), 0) << "an outsider got a byte";
  }
  const Socket late([] { return socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0); });
  EXPECT_NE(connect(late.get(), address_in(invitation).any(), address_in(invitation).size), 0) << "still listens";
}

/// Of a job that has ended, also if another program listens at its address.
TEST(Handshake, AFormerInvitationIsIgnored) {
  Meeting former(2);
  expect_connected(former);
  const auto other_program = listen_somewhere();
  const auto address = Endpoint::of(other_program.get());
  auto taken = former.board;
  std::memcpy(taken.data() + taken.size() - sizeof address, &address, sizeof address);
  for (const auto& board : {former.board, taken}) {
    Meeting meeting(3);
    meeting.board = board;
    std::vector<std::thread> threads;
    for (const int r : {2, 1, 0}) {
      threads.emplace_back([&, r] { meeting.connect(r); });
      std::this_thread::sleep_for(kShortLimit);
    }
    for (auto& thread : threads) thread.join();
    meeting.connections[2]->send(1, {1, 1}, {.text = "word"});
    EXPECT_EQ(meeting.connections[1]->receive(2, {1, 1}, kLongLimit, nullptr).text, "word");
  }
}

/// While others have not come.
TEST(Handshake, ARankThatEndsIsNamed) {
  for (const int culprit : {0, 1, 2}) {
    Meeting meeting(4);
    std::vector<std::thread> threads;
    for (int r = 0; r < 3; ++r) {
      threads.emplace_back([&, r] {
        const auto end = [&] {
          if (r != culprit) return;
          const auto& leader = *meeting.connections[0];
          if (leader.has(1) && leader.has(2)) throw std::domain_error("the end");
        };
        EXPECT_THROW(meeting.connect(r, kLongLimit, end), std::exception);
        if (r == culprit) meeting.connections[r] = nullptr;  // as the end of its process
      });
    }
    for (auto& thread : threads) thread.join();
    if (culprit == 1) {
      EXPECT_THAT(
          [&] { meeting.connect(3, kShortLimit); },
          throws<ConnectionError>("rank 0 of 4 did not come within 0.0 s; the last job has failed: rank 1 was lost"));
    }
    for (const int r : {0, 1, 2}) {
      if (r == culprit) continue;
      EXPECT_THAT(meeting.connections[r]->failure(), HasSubstr("rank " + std::to_string(culprit) + " was lost"));
    }
  }
}

TEST(Handshake, ARankThatDoesNotComeIsNamed) {
  Meeting meeting(3);
  EXPECT_THAT([&] { meeting.connect(1, kShortLimit); }, throws<ConnectionError>("rank 0 of 3 did not come within"));
  EXPECT_THAT([&] { meeting.connect(0, kShortLimit); }, throws<ConnectionError>("rank 1, 2 of 3 did not come within"));
  EXPECT_THROW(meeting.connect(1, kLongLimit, [] { throw std::domain_error("stop"); }), std::domain_error);
}

}  // namespace
}  // namespace gpipe::testing
