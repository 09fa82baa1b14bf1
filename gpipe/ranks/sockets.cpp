#include "gpipe/ranks/sockets.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <thread>

#include "absl/strings/str_cat.h"
#include "gpipe/ranks/inbox.h"
#include "gpipe/ranks/outbox.h"

namespace gpipe {
namespace {

/// The connection to one rank.
struct Peer {
  Peer(Socket given, int rank) : socket(std::move(given)), inbox(socket.get(), rank), outbox(socket.get()) {}

  /// Ends all transfers. Returns false if this was called before.
  bool fail(const std::exception_ptr& error) {
    const bool is_first = outbox.fail(error);
    if (is_first) shutdown(socket.get(), SHUT_RDWR);
    inbox.fail(error);
    return is_first;
  }

  const Socket socket;
  Inbox inbox;
  Outbox outbox;
};

class SocketConnections : public Connections {
 public:
  SocketConnections(std::vector<Socket> sockets, OnLoss on_loss)
      : on_loss_(std::move(on_loss)), wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    if (wake_ < 0) throw ConnectionError(absl::StrCat("no event can be made: ", std::strerror(errno)));
    for (std::size_t r = 0; r < sockets.size(); ++r) {
      peers_.push_back(sockets[r] ? std::make_unique<Peer>(std::move(sockets[r]), static_cast<int>(r)) : nullptr);
    }
    thread_ = std::thread([this] { run(); });
  }
  ~SocketConnections() override {
    close();
    ending_ = true;
    wake();
    thread_.join();
    ::close(wake_);
  }

  std::shared_ptr<Transfer> send(int rank, int tag, std::span<const std::byte> bytes,
                                 std::shared_ptr<const void> owner) override {
    auto& outbox = peers_.at(rank)->outbox;
    auto made = outbox.send(tag, bytes, std::move(owner));
    if (outbox.has_output()) wake();
    return made;
  }
  std::shared_ptr<Transfer> receive(int rank, int tag, std::span<std::byte> memory) override {
    auto& [socket, inbox, outbox] = *peers_.at(rank);
    auto made = inbox.receive(tag, memory, outbox);
    if (outbox.has_output()) wake();
    return made;
  }

  void end_tags(int first, int last) override {
    for (const auto& peer : peers_) {
      if (!peer) continue;
      peer->inbox.end_tags(first, last);
      peer->outbox.end_tags(first, last);
    }
  }

  void close() noexcept override {
    const auto closed = std::make_exception_ptr(ConnectionError("the connections were closed"));
    for (const auto& peer : peers_) {
      if (peer) peer->fail(closed);
    }
  }

 private:
  void wake() {
    const std::uint64_t one = 1;
    static_cast<void>(::write(wake_, &one, sizeof one));  // fails only if it is awake
  }

  void run() {
    std::vector<char> is_open(peers_.size());
    for (std::size_t r = 0; r < peers_.size(); ++r) is_open[r] = peers_[r] != nullptr;
    std::vector<pollfd> states(peers_.size() + 1);
    while (!ending_) {
      for (std::size_t r = 0; r < peers_.size(); ++r) {
        states[r] = {.fd = is_open[r] ? peers_[r]->socket.get() : -1, .events = POLLIN, .revents = 0};
        if (is_open[r] && peers_[r]->outbox.has_output()) states[r].events |= POLLOUT;
      }
      states.back() = {.fd = wake_, .events = POLLIN, .revents = 0};
      poll(states.data(), states.size(), /*timeout=*/-1);
      std::uint64_t count = 0;
      if (states.back().revents != 0) static_cast<void>(::read(wake_, &count, sizeof count));
      for (std::size_t r = 0; r < peers_.size(); ++r) {
        if ((states[r].revents & POLLOUT) != 0) peers_[r]->outbox.write();
        if ((states[r].revents & ~POLLOUT) != 0) is_open[r] = read(static_cast<int>(r));
      }
    }
  }

  /// Returns whether the connection is open.
  bool read(int rank) {
    auto& peer = *peers_[rank];
    const auto end = [&](const std::string& cause) {
      if (peer.fail(std::current_exception())) on_loss_(rank, cause);
    };
    try {
      peer.inbox.read(peer.outbox);
      return true;
    } catch (const ConnectionError&) {
      end("");
    } catch (const std::exception& error) {
      end(error.what());
    }
    return false;
  }

  const OnLoss on_loss_;
  const int wake_;
  std::atomic<bool> ending_ = false;
  std::vector<std::unique_ptr<Peer>> peers_;  // by rank
  std::thread thread_;                        // last, because the thread uses the other members
};

}  // namespace

std::unique_ptr<Connections> connections_over(std::vector<Socket> sockets, OnLoss on_loss) {
  return std::make_unique<SocketConnections>(std::move(sockets), std::move(on_loss));
}

}  // namespace gpipe
