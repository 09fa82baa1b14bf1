#pragma once

#include <utility>

#include "absl/functional/function_ref.h"

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

  /// Whether the other end has closed the connection. What it has sent before may not have been read.
  bool is_ended() const;

 private:
  int descriptor_ = -1;
};

}  // namespace gpipe
