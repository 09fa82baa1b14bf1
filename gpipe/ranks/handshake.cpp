#include "gpipe/ranks/handshake.h"

#include <fcntl.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <cstring>

#include "absl/strings/escaping.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "gpipe/base/bytes.h"
#include "gpipe/base/checks.h"

namespace gpipe {
namespace {

using Clock = std::chrono::steady_clock;

constexpr Topic kAddresses{0, 1};
constexpr std::size_t kMostGuests = 64;
constexpr std::chrono::seconds kLongestGreeting{5};

/// What both ends of a connection send first. Rank 0's is on the board.
struct Greeting {
  std::array<char, 32> secret = {};
  std::array<char, 8> name = {};
  std::int64_t rank = 0;
  Endpoint listens_at = {};
};

/// A connection whose other end has not greeted yet.
struct Stranger {
  Socket socket;
  Clock::time_point came = Clock::now();
  Greeting greeting = {};
  std::size_t received = 0;

  bool has_greeted() const { return received == sizeof greeting; }
  /// Returns whether it may still greet.
  bool receive() {
    auto* to = reinterpret_cast<char*>(&greeting) + received;
    const auto count = recv(socket.get(), to, sizeof greeting - received, MSG_DONTWAIT);
    if (count < 0) return errno == EAGAIN || errno == EINTR;
    received += count;
    return count != 0 || has_greeted();
  }
};

class Handshake {
 public:
  Handshake(Connections& connections, int rank, int size, Socket listener, const Poll& poll)
      : connections_(connections), size_(size), listener_(std::move(listener)), poll_(poll), addresses_(size) {
    own_.rank = rank;
    own_.listens_at = Endpoint::of(listener_.get());
    fcntl(listener_.get(), F_SETFL, fcntl(listener_.get(), F_GETFL) | O_NONBLOCK);
  }

  void lead(const Board& board, std::chrono::milliseconds limit) {
    if (getentropy(own_.secret.data(), own_.secret.size()) != 0 ||
        getentropy(own_.name.data(), own_.name.size()) != 0) {
      throw_error("this system has no random bytes");
    }
    board.write(to_bytes(std::vector{own_}));
    try {
      accept_from(1, limit);
    } catch (const std::exception& error) {
      const auto cause = connections_.failure();
      try {
        board.write(absl::StrCat("; the last job has failed: ", cause.empty() ? error.what() : cause));
      } catch (const std::exception&) {  // the first error says more
      }
      throw;
    }
    for (int r = 1; r < size_; ++r) connections_.send(r, kAddresses, {.text = to_bytes(addresses_)});
    // A rank that does not know yet that it was taken must not see the invitation to the next job.
    for (int r = 1; r < size_; ++r) connections_.receive(r, kAddresses, at_most_a_year(limit), poll_);
  }

  void follow(const Board& board, std::chrono::milliseconds join_limit, std::chrono::milliseconds limit) {
    call_leader(board, join_limit);
    const auto longest = at_most_a_year(join_limit) + at_most_a_year(limit);  // rank 0's wait ends before
    addresses_ = to_items<Endpoint>(connections_.receive(0, kAddresses, longest, poll_).text);
    connections_.send(0, kAddresses, {});
    for (int other = 1; other < own_.rank; ++other) {
      for (const auto end = end_after(limit); !call(other, addresses_.at(other), end); wait({})) {
        if (Clock::now() >= end) throw late({other}, limit);
      }
    }
    accept_from(static_cast<int>(own_.rank) + 1, limit);
  }

  std::string name() const { return absl::BytesToHexString({own_.name.data(), own_.name.size()}); }

 private:
  void call_leader(const Board& board, std::chrono::milliseconds limit) {
    std::string why;
    for (const auto end = end_after(limit);; wait({})) {
      const auto text = board.read();
      if (text.size() != sizeof(Greeting)) {
        why = text;
      } else {
        const auto leader = ByteReader(text).get<Greeting>();
        own_.secret = leader.secret;
        own_.name = leader.name;
        // Looks at the board meanwhile: a rank 0 that is gone may not refuse the call.
        if (call(0, leader.listens_at, end, [&] { return board.read() == text; })) return;
      }
      if (Clock::now() >= end) throw late({0}, limit, why);
    }
  }

  /// Connects to a rank. Returns false if it does not listen there, or is no rank of this job, or does not answer.
  bool call(int rank, const Endpoint& to, Clock::time_point end, const std::function<bool()>& goes_on = nullptr) {
    Stranger called{
        Socket([&] { return socket(to.address.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0); })};
    for (bool is_connected = false; Clock::now() < end && (!goes_on || goes_on());) {
      if (!is_connected) {
        is_connected = connect(called.socket.get(), to.any(), to.size) == 0 || errno == EISCONN;
        if (!is_connected && errno != EINPROGRESS && errno != EALREADY && errno != EINTR) return false;
        if (is_connected) greet(called.socket);
      }
      if (is_connected && !called.receive()) return false;
      if (called.has_greeted()) {
        if (!is_of_job(called.greeting) || called.greeting.rank != rank) return false;
        connections_.add(rank, std::move(called.socket));
        return true;
      }
      wait({{.fd = called.socket.get(), .events = static_cast<short>(is_connected ? POLLIN : POLLOUT), .revents = 0}});
    }
    return false;
  }

  /// Waits until all ranks from `first` on have called. Then it listens no more.
  void accept_from(int first, std::chrono::milliseconds limit) {
    std::deque<Stranger> guests;
    for (const auto end = end_after(limit);;) {
      std::vector<int> missing;
      for (int r = first; r < size_; ++r) {
        if (!connections_.has(r)) missing.push_back(r);
      }
      if (missing.empty()) break;
      if (Clock::now() >= end) throw late(missing, limit);
      std::vector<pollfd> states{{.fd = listener_.get(), .events = POLLIN, .revents = 0}};
      for (const auto& guest : guests) states.push_back({.fd = guest.socket.get(), .events = POLLIN, .revents = 0});
      wait(std::move(states));
      accept_guests(guests);
      for (auto& guest : guests) {
        const bool goes_on = guest.receive() && Clock::now() - guest.came < kLongestGreeting;
        if (guest.has_greeted() && is_of_job(guest.greeting) && guest.greeting.rank >= first &&
            !connections_.has(static_cast<int>(guest.greeting.rank))) {
          const auto rank = static_cast<int>(guest.greeting.rank);
          greet(guest.socket);
          addresses_[rank] = guest.greeting.listens_at;
          connections_.add(rank, std::move(guest.socket));
        }
        if (!goes_on || guest.has_greeted()) guest.socket = Socket();
      }
      std::erase_if(guests, [](const Stranger& guest) { return !guest.socket; });
    }
    listener_ = Socket();
  }

  void accept_guests(std::deque<Stranger>& guests) {
    for (std::size_t count = 0; count < kMostGuests; ++count) {
      Socket guest([&] { return accept4(listener_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC); });
      if (!guest && (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS)) {
        throw ConnectionError(absl::StrCat("no connection can be accepted: ", std::strerror(errno)));
      }
      if (!guest) return;
      guests.push_back({std::move(guest)});
      if (guests.size() > std::max<std::size_t>(kMostGuests, size_)) guests.pop_front();
    }
  }

  bool is_of_job(const Greeting& greeting) const {
    unsigned char difference = 0;
    for (std::size_t i = 0; i < own_.secret.size(); ++i) difference |= greeting.secret[i] ^ own_.secret[i];
    return difference == 0 && greeting.rank >= 0 && greeting.rank < size_;
  }

  void greet(const Socket& socket) {
    const int on = 1;
    setsockopt(socket.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    // The socket's buffer is empty. An error shows in the next receive.
    static_cast<void>(send(socket.get(), &own_, sizeof own_, MSG_DONTWAIT | MSG_NOSIGNAL));
  }

  ConnectionError late(const std::vector<int>& ranks, std::chrono::milliseconds limit,
                       const std::string& why = "") const {
    return ConnectionError(absl::StrFormat("rank %s of %d did not come within %.1f s%s", absl::StrJoin(ranks, ", "),
                                           size_, std::chrono::duration<double>(limit).count(), why));
  }

  /// Waits for an event, but not long.
  void wait(std::vector<pollfd> events) {
    ::poll(events.data(), events.size(), static_cast<int>(kPollPeriod.count()));
    if (!connections_.failure().empty()) throw ConnectionError("a rank has failed");
    if (poll_) poll_();
  }

  Connections& connections_;
  const int size_;
  Socket listener_;
  const Poll& poll_;
  Greeting own_;
  std::vector<Endpoint> addresses_;  // by rank
};

}  // namespace

std::string connect_ranks(Connections& connections, int rank, int size, Socket listener, const Board& board,
                          std::chrono::milliseconds join_timeout, std::chrono::milliseconds timeout, const Poll& poll) {
  Handshake handshake(connections, rank, size, std::move(listener), poll);
  rank == 0 ? handshake.lead(board, join_timeout) : handshake.follow(board, join_timeout, timeout);
  return handshake.name();
}

}  // namespace gpipe
