#include "gpipe/ranks/meeting.h"

#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "gpipe/base/checks.h"

namespace gpipe {
namespace {

// Returns the first socket for an address of the host that `use` accepts, which the caller owns; -1 if there is none.
int first_socket(const std::string& host, int port, int type, absl::FunctionRef<bool(int, const addrinfo&)> use) {
  addrinfo hints = {};
  hints.ai_socktype = type & ~SOCK_NONBLOCK;
  addrinfo* found = nullptr;
  if (const int error = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found); error != 0) {
    throw_error("the address of the host '", host, "' is not known: ", gai_strerror(error));
  }
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> addresses(found, &freeaddrinfo);
  for (const auto* address = found; address != nullptr; address = address->ai_next) {
    const int made = socket(address->ai_family, type | SOCK_CLOEXEC, address->ai_protocol);
    if (made >= 0 && use(made, *address)) return made;
    if (made >= 0) close(made);
  }
  return -1;
}

// Connects within a second. Returns whether it has.
bool connect_soon(int descriptor, const addrinfo& address) {
  if (connect(descriptor, address.ai_addr, address.ai_addrlen) == 0) return true;
  pollfd state{.fd = descriptor, .events = POLLOUT, .revents = 0};
  if (errno != EINPROGRESS || poll(&state, 1, /*timeout=*/1000) != 1) return false;
  int error = 0;
  socklen_t size = sizeof error;
  return getsockopt(descriptor, SOL_SOCKET, SO_ERROR, &error, &size) == 0 && error == 0;
}

struct Watch {
  /// A connection to the store's process, which ends with it and carries nothing. -1 for other stores.
  int probe = -1;
  std::atomic<bool> ended = false;

  ~Watch() {
    if (probe >= 0) close(probe);
  }
  bool has_ended() {
    pollfd state{.fd = probe, .events = POLLRDHUP, .revents = 0};
    if (probe >= 0 && poll(&state, 1, /*timeout=*/0) == 1) ended = true;
    return ended;
  }
};

class WatchedStore : public c10d::PrefixStore {
 public:
  using Bytes = std::vector<std::uint8_t>;

  WatchedStore(const std::string& prefix, c10::intrusive_ptr<c10d::Store> store, std::shared_ptr<Watch> watch)
      : PrefixStore(prefix, std::move(store)), watch_(std::move(watch)) {}

  c10::intrusive_ptr<c10d::Store> clone() override {
    return use([&] { return c10::make_intrusive<WatchedStore>(prefix_, store_->clone(), watch_); });
  }
  void set(const std::string& key, const Bytes& value) override {
    use([&] { PrefixStore::set(key, value); });
  }
  Bytes compareSet(const std::string& key, const Bytes& expected, const Bytes& desired) override {
    return use([&] { return PrefixStore::compareSet(key, expected, desired); });
  }
  Bytes get(const std::string& key) override {
    return use([&] { return PrefixStore::get(key); });
  }
  std::int64_t add(const std::string& key, std::int64_t value) override {
    return use([&] { return PrefixStore::add(key, value); });
  }
  bool check(const std::vector<std::string>& keys) override {
    return use([&] { return PrefixStore::check(keys); });
  }

 private:
  template <typename Use>
  std::invoke_result_t<Use> use(Use use) {
    try {
      if (!watch_->has_ended()) return use();
    } catch (const c10::DistNetworkError&) {
      watch_->ended = true;
    }
    throw_error("the store of the job has ended, as it does when rank 0 or torchrun ends");
  }

  const std::shared_ptr<Watch> watch_;  // shared with clones
};

}  // namespace

std::string local_address_towards(const std::string& host) {
  char text[NI_MAXHOST];
  // Connecting a datagram socket sends nothing.
  const int found = first_socket(host, /*port=*/9, SOCK_DGRAM, [&](int descriptor, const addrinfo& address) {
    sockaddr_storage local = {};
    socklen_t length = sizeof local;
    auto* const any = reinterpret_cast<sockaddr*>(&local);
    return connect(descriptor, address.ai_addr, address.ai_addrlen) == 0 &&
           getsockname(descriptor, any, &length) == 0 &&
           getnameinfo(any, length, text, sizeof text, nullptr, 0, NI_NUMERICHOST) == 0;
  });
  if (found < 0) throw_error("no network interface of this host reaches '", host, "'");
  close(found);
  return text;
}

int listen_at(const std::string& host, int port) {
  int error = EADDRNOTAVAIL;
  const int found = first_socket(host, port, SOCK_STREAM, [&](int descriptor, const addrinfo& address) {
    const int on = 1;
    const bool listens = setsockopt(descriptor, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) == 0 &&
                         bind(descriptor, address.ai_addr, address.ai_addrlen) == 0 &&
                         listen(descriptor, SOMAXCONN) == 0;
    error = errno;
    return listens;
  });
  if (found >= 0) return found;
  throw_error("rank 0 cannot listen at ", host, ":", port, ": ", std::strerror(error),
              "; give an address of its host and a free port");
}

c10::intrusive_ptr<c10d::Store> watched_store(const std::string& prefix, c10::intrusive_ptr<c10d::Store> store) {
  auto watch = std::make_shared<Watch>();
  auto watched = c10::make_intrusive<WatchedStore>(prefix, std::move(store), watch);
  const auto innermost = watched->getUnderlyingNonPrefixStore();
  if (const auto* served = dynamic_cast<const c10d::TCPStore*>(innermost.get())) {
    watch->probe = first_socket(served->getHost(), served->getPort(), SOCK_STREAM | SOCK_NONBLOCK, connect_soon);
  }
  return watched;
}

}  // namespace gpipe
