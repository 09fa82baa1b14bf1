#include "gpipe/ranks/network.h"

#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <utility>

namespace gpipe {
namespace {

using Addresses = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

Addresses addresses_of(const std::string& host, int port, int socket_type) {
  addrinfo hints = {};
  hints.ai_socktype = socket_type;
  addrinfo* found = nullptr;
  if (const int error = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found); error != 0) {
    throw std::runtime_error("[gpipe] the address of the host '" + host + "' is not known: " + gai_strerror(error));
  }
  return {found, &freeaddrinfo};
}

class Socket {
 public:
  explicit Socket(const addrinfo& address, int flags = 0)
      : descriptor_(socket(address.ai_family, address.ai_socktype | SOCK_CLOEXEC | flags, address.ai_protocol)) {}
  ~Socket() {
    if (descriptor_ >= 0) close(descriptor_);
  }
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;

  int descriptor() const { return descriptor_; }
  int release() { return std::exchange(descriptor_, -1); }

 private:
  int descriptor_;
};

// Connects within a second. Returns whether it has.
bool connect_soon(int descriptor, const addrinfo& address) {
  if (connect(descriptor, address.ai_addr, address.ai_addrlen) == 0) return true;
  pollfd state{.fd = descriptor, .events = POLLOUT, .revents = 0};
  if (errno != EINPROGRESS || poll(&state, 1, /*timeout=*/1000) != 1) return false;
  int error = 0;
  socklen_t size = sizeof error;
  return getsockopt(descriptor, SOL_SOCKET, SO_ERROR, &error, &size) == 0 && error == 0;
}

// Returns a connected socket, or -1.
int connect_to(const std::string& host, int port) {
  const auto addresses = addresses_of(host, port, SOCK_STREAM);
  for (const auto* address = addresses.get(); address != nullptr; address = address->ai_next) {
    Socket socket(*address, SOCK_NONBLOCK);
    if (socket.descriptor() >= 0 && connect_soon(socket.descriptor(), *address)) return socket.release();
  }
  return -1;
}

}  // namespace

std::string local_address_towards(const std::string& host) {
  const auto addresses = addresses_of(host, /*port=*/9, SOCK_DGRAM);
  for (const auto* address = addresses.get(); address != nullptr; address = address->ai_next) {
    const Socket socket(*address);  // connecting a datagram socket sends nothing
    if (socket.descriptor() < 0) continue;
    if (connect(socket.descriptor(), address->ai_addr, address->ai_addrlen) != 0) continue;
    sockaddr_storage local = {};
    socklen_t length = sizeof local;
    char text[NI_MAXHOST];
    if (getsockname(socket.descriptor(), reinterpret_cast<sockaddr*>(&local), &length) == 0 &&
        getnameinfo(reinterpret_cast<sockaddr*>(&local), length, text, sizeof text, nullptr, 0, NI_NUMERICHOST) == 0) {
      return text;
    }
  }
  throw std::runtime_error("[gpipe] no network interface of this host reaches '" + host + "'");
}

int listen_at(const std::string& host, int port) {
  const auto addresses = addresses_of(host, port, SOCK_STREAM);
  int error = 0;
  for (const auto* address = addresses.get(); address != nullptr; address = address->ai_next) {
    Socket socket(*address);
    const int on = 1;
    if (socket.descriptor() >= 0 && setsockopt(socket.descriptor(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) == 0 &&
        bind(socket.descriptor(), address->ai_addr, address->ai_addrlen) == 0 &&
        listen(socket.descriptor(), SOMAXCONN) == 0) {
      return socket.release();
    }
    error = errno;
  }
  throw std::runtime_error("[gpipe] rank 0 cannot listen at " + host + ":" + std::to_string(port) + ": " +
                           std::strerror(error) + "; give an address of its host and a free port");
}

Probe::Probe(const std::string& host, int port) : descriptor_(connect_to(host, port)) {}

Probe::~Probe() {
  if (descriptor_ >= 0) close(descriptor_);
}

bool Probe::has_ended() const {
  pollfd state{.fd = descriptor_, .events = POLLRDHUP, .revents = 0};
  return descriptor_ >= 0 && poll(&state, 1, /*timeout=*/0) == 1;
}

}  // namespace gpipe
