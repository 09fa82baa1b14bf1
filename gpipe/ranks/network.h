#pragma once

#include <netdb.h>
#include <netinet/in.h>

#include <string>

#include "absl/functional/function_ref.h"

// The network interfaces of this host, and addresses. Errors are std::runtime_error.

namespace gpipe {

/// Returns the first socket for an address of the host that `use` accepts, which the caller owns; -1 if there is none.
/// Errors: for a host that is not known.
int first_socket(const std::string& host, int port, int type, absl::FunctionRef<bool(int, const addrinfo&)> use);

/// Connects within a second. Returns whether it has.
bool connect_soon(int descriptor, const addrinfo& address);

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

/// An address with a port.
struct Endpoint {
  sockaddr_storage address = {};
  socklen_t size = sizeof address;

  /// That of a socket that listens.
  static Endpoint of(int socket);
  std::string text() const;  ///< such as "127.0.0.1:29500"
  sockaddr* any() { return reinterpret_cast<sockaddr*>(&address); }
  const sockaddr* any() const { return reinterpret_cast<const sockaddr*>(&address); }
};

}  // namespace gpipe
