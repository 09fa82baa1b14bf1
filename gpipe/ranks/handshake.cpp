#include "gpipe/ranks/handshake.h"

#include <fcntl.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <deque>

#include "absl/strings/str_join.h"
#include "gpipe/base/checks.h"

namespace gpipe {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t kSecretBytes = 32;
constexpr std::size_t kMostGuests = 64;
constexpr std::chrono::seconds kLongestGreeting{5};

/// What both ends of a connection send first.
struct Greeting {
  std::array<char, kSecretBytes> secret;
  std::int32_t rank;
};

/// A connection whose other end has not greeted yet.
struct Stranger {
  Socket socket;
  Clock::time_point came = {};
  bool is_connected = false;
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

// A rank calls each other one. Of the two connections of a pair, the one that the higher rank made remains. The other
// tells the lower rank if the higher one ends before it has called. The higher rank greets back there only when its own
// is complete: so whoever has got all greetings knows that the others need only the connections that remain.
class Handshake {
 public:
  Handshake(Socket listener, const JobAddresses& job)
      : listener_(std::move(listener)), job_(job), peers_(job.endpoints.size()) {
    std::memcpy(own_.secret.data(), job.secret.data(), std::min(job.secret.size(), kSecretBytes));
    own_.rank = job.rank;
    fcntl(listener_.get(), F_SETFL, fcntl(listener_.get(), F_GETFL) | O_NONBLOCK);
  }

  std::vector<Socket> run(std::chrono::milliseconds limit, const Poll& poll) {
    for (const auto end = end_after(limit);;) {
      accept_guests();
      hear_guests();
      std::vector<int> missing;
      for (int r = 0; r < std::ssize(peers_); ++r) {
        if (r != job_.rank && !advance(r)) missing.push_back(r);
      }
      if (missing.empty()) break;
      if (Clock::now() >= end) {
        throw ConnectionError(
            absl::StrCat("rank ", absl::StrJoin(missing, ", "), " did not connect within ", limit.count(), " ms"));
      }
      await_events();
      if (poll) poll();
    }
    std::vector<Socket> sockets;
    for (auto& peer : peers_) sockets.push_back(std::move(is_mine(peer) ? peer.called.socket : peer.calls));
    return sockets;
  }

 private:
  struct Peer {
    Stranger called;  // by this rank
    bool has_answered = false;
    Socket calls;  // this rank
    bool is_answered = false;
  };

  /// Whether the connection that this rank made remains.
  bool is_mine(const Peer& peer) const { return &peer - peers_.data() < job_.rank; }

  void accept_guests() {
    for (std::size_t count = 0; count < kMostGuests; ++count) {
      Socket guest([&] { return accept4(listener_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC); });
      if (!guest && (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS)) {
        throw ConnectionError(absl::StrCat("no connection can be accepted: ", std::strerror(errno)));
      }
      if (!guest) return;
      guests_.push_back({std::move(guest), Clock::now()});
      if (guests_.size() > kMostGuests) guests_.pop_front();
    }
  }

  void hear_guests() {
    for (auto& guest : guests_) {
      const bool goes_on = guest.receive() && Clock::now() - guest.came < kLongestGreeting;
      if (guest.has_greeted() && is_of_job(guest.greeting)) {
        auto& peer = peers_[guest.greeting.rank];
        peer.calls = std::move(guest.socket);
        peer.is_answered = false;
      }
      if (!goes_on || guest.has_greeted()) guest.socket = Socket();
    }
    std::erase_if(guests_, [](const Stranger& guest) { return !guest.socket; });
  }

  bool is_of_job(const Greeting& greeting) const {
    unsigned char difference = 0;
    for (std::size_t i = 0; i < kSecretBytes; ++i) difference |= greeting.secret[i] ^ own_.secret[i];
    return difference == 0 && greeting.rank >= 0 && greeting.rank < std::ssize(peers_) && greeting.rank != job_.rank;
  }

  /// Returns whether both ends have greeted on both connections.
  bool advance(int rank) {
    auto& peer = peers_[rank];
    if (!peer.has_answered) call(rank);
    if (peer.calls && !peer.is_answered && (peer.has_answered || !is_mine(peer))) {
      greet(peer.calls);
      peer.is_answered = true;
    }
    const auto& remaining = is_mine(peer) ? peer.called.socket : peer.calls;
    const bool is_complete = is_mine(peer) ? peer.has_answered : peer.is_answered;
    if (is_complete && remaining.is_ended()) throw RankLost(rank);
    return peer.has_answered && peer.is_answered;
  }

  void call(int rank) {
    auto& called = peers_[rank].called;
    const auto& to = job_.endpoints[rank];
    if (!called.socket) {
      if (Clock::now() - called.came < kPollPeriod) return;
      called = {Socket([&] { return socket(to.address.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0); }),
                Clock::now()};
    }
    if (!called.is_connected) {
      if (connect(called.socket.get(), to.any(), to.size) != 0 && errno != EISCONN) {
        if (errno == EINPROGRESS || errno == EALREADY || errno == EINTR) return;
        if (errno == ECONNREFUSED) throw RankLost(rank);  // it listens until all have connected to it
        throw ConnectionError(
            absl::StrCat("rank ", rank, " cannot be reached at ", to.text(), ": ", std::strerror(errno)));
      }
      called.is_connected = true;
      greet(called.socket);
    }
    const bool goes_on = called.receive();
    if (!goes_on) called.socket = Socket();  // it may have closed this among others; calls again
    if (!called.has_greeted()) return;
    if (!is_of_job(called.greeting) || called.greeting.rank != rank) {
      throw ConnectionError(absl::StrCat("another program has the address of rank ", rank, ", ", to.text()));
    }
    peers_[rank].has_answered = true;
  }

  void greet(const Socket& socket) {
    const int on = 1;
    setsockopt(socket.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    // The socket's buffer is empty. An error shows in the next receive.
    static_cast<void>(send(socket.get(), &own_, sizeof own_, MSG_DONTWAIT | MSG_NOSIGNAL));
  }

  void await_events() {
    std::vector<pollfd> states{{.fd = listener_.get(), .events = POLLIN, .revents = 0}};
    const auto add = [&](const Socket& socket, short events) {
      if (socket) states.push_back({.fd = socket.get(), .events = events, .revents = 0});
    };
    for (const auto& guest : guests_) add(guest.socket, POLLIN);
    for (const auto& peer : peers_) {
      if (!peer.has_answered) add(peer.called.socket, peer.called.is_connected ? POLLIN : POLLOUT);
    }
    ::poll(states.data(), states.size(), static_cast<int>(kPollPeriod.count()));
  }

  const Socket listener_;
  const JobAddresses& job_;
  Greeting own_ = {};
  std::vector<Peer> peers_;  // by rank
  std::deque<Stranger> guests_;
};

}  // namespace

std::string make_secret() {
  std::string secret(kSecretBytes, '\0');
  if (getentropy(secret.data(), secret.size()) != 0) throw_error("this system has no random bytes");
  return secret;
}

std::vector<Socket> connect_ranks(Socket listener, const JobAddresses& job, std::chrono::milliseconds limit,
                                  const Poll& poll, const std::function<void(const ConnectionError&)>& report) {
  Handshake handshake(std::move(listener), job);
  try {
    return handshake.run(limit, poll);
  } catch (const ConnectionError& error) {
    if (report) report(error);
    throw;
  }
}

}  // namespace gpipe
