#pragma once

#include <netdb.h>
#include <netinet/in.h>

#include <string>
#include <utility>

#include "absl/functional/function_ref.h"

// Sockets, and the network interfaces of this host. Errors are std::runtime_error.

namespace gpipe {

/// Owns a socket. Processes that this one starts do not have it: it is closed when they execute a program, and in a
/// fork at once. So its other end notices the end of this process, whatever processes are left.
class Socket {
 public:
  Socket() = default;
  /// Takes the socket that `make` returns; none for -1. `make` must set SOCK_CLOEXEC, and must not fork.
  explicit Socket(absl::FunctionRef<int()> make);
  Socket(Socket&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)) {}
  Socket& operator=(Socket&& other) noexcept {
    std::swap(descriptor_, other.descriptor_);
    return *this;
  }
  ~Socket();

  /// -1: none.
  int get() const { return descriptor_; }
  explicit operator bool() const { return descriptor_ >= 0; }

 private:
  int descriptor_ = -1;
};

/// An address with a port.
struct Endpoint {
  sockaddr_storage address = {};
  socklen_t size = sizeof address;

  /// That of a socket that listens.
  static Endpoint of(int socket);
  sockaddr* any() { return reinterpret_cast<sockaddr*>(&address); }
  const sockaddr* any() const { return reinterpret_cast<const sockaddr*>(&address); }
};

/// Returns the address of this host from which packets to `host` leave. Errors: if there is none.
std::string local_address_towards(const std::string& host);

/// Returns the address of a network interface: the IPv4 one if it has any. Errors: if there is none.
std::string address_of_interface(const std::string& name);

/// Returns the address to which this host's name leads, or the loopback address if that is not of this host.
std::string address_of_this_host();

/// Returns a socket at which `rank`, this process, listens at an address of this host, and nowhere else. Port 0 stands
/// for any that is free. The caller owns the socket. Errors: for an address that is not this host's, or a port that is
/// taken.
int listen_at(int rank, const std::string& host, int port);

}  // namespace gpipe
