#pragma once

#include <string>

namespace gpipe {

/// Returns the address of this host from which packets to `host` leave. Errors: std::runtime_error if there is none.
std::string local_address_towards(const std::string& host);

/// Returns a socket that listens at an address of this host, and nowhere else. The caller owns it. Errors:
/// std::runtime_error for an address that is not this host's, or a port that is taken.
int listen_at(const std::string& host, int port);

}  // namespace gpipe
