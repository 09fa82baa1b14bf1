#pragma once

#include <string>

namespace gpipe {

/// Returns the address of this host from which packets to `host` leave. Errors: std::runtime_error if there is none.
std::string local_address_towards(const std::string& host);

/// Returns a socket that listens at an address of this host, and nowhere else. The caller owns it. Errors:
/// std::runtime_error for an address that is not this host's, or a port that is taken.
int listen_at(const std::string& host, int port);

/// A connection that carries nothing. It shows whether the process at its other end has ended. Thread safety: any thread.
class Probe {
 public:
  /// Errors: std::runtime_error for an unknown host.
  Probe(const std::string& host, int port);
  ~Probe();
  Probe(const Probe&) = delete;
  Probe& operator=(const Probe&) = delete;

  /// Whether the connection was closed. False if there was none.
  bool has_ended() const;

 private:
  const int descriptor_;
};

}  // namespace gpipe
