#pragma once

#include <chrono>
#include <memory>
#include <span>
#include <stdexcept>

namespace gpipe {

/// A connection to another rank was lost or closed, or the other rank did not answer in time.
class ConnectionError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// The other rank did not answer in time.
class TimeoutError : public ConnectionError {
 public:
  using ConnectionError::ConnectionError;
};

/// One send or receive, used by one thread at a time. REQUIRES: its memory stays until it is complete or the
/// connections are closed.
class Transfer {
 public:
  virtual ~Transfer() = default;
  /// Waits until it is complete. Errors: ConnectionError; TimeoutError, which leaves it in flight.
  virtual void wait(std::chrono::milliseconds limit) = 0;
};

/// This process's connections to the other ranks of a job, which carry bytes.
///
/// Between two ranks, the n-th send with a tag completes the n-th receive with that tag, whose memory must be at least
/// as long. Every receive must be completed by a send, or the connections closed. Thread-safe.
class Connections {
 public:
  virtual ~Connections() = default;

  /// Starts a send or a receive. Does not wait. Errors: ConnectionError.
  virtual std::shared_ptr<Transfer> send(int rank, int tag, std::span<const std::byte> bytes) = 0;
  virtual std::shared_ptr<Transfer> receive(int rank, int tag, std::span<std::byte> bytes) = 0;

  /// Closes all connections: transfers in flight fail, here and on the other ranks. Can be repeated.
  virtual void close() noexcept = 0;
};

}  // namespace gpipe
