#pragma once

#include <algorithm>
#include <chrono>
#include <functional>
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

/// Called every kPollPeriod by a function that waits, on the caller's thread. Its errors end the wait. May be null.
using Poll = std::function<void()>;
inline constexpr std::chrono::milliseconds kPollPeriod{50};

/// The time at which a wait of at most `limit` ends that begins now. `limit` may be the largest number.
inline std::chrono::steady_clock::time_point end_after(std::chrono::milliseconds limit) {
  return std::chrono::steady_clock::now() + std::min<std::chrono::milliseconds>(limit, std::chrono::hours(24 * 365));
}

/// One send or receive, used by one thread at a time.
class Transfer {
 public:
  virtual ~Transfer() = default;
  /// Whether it is complete or has failed.
  virtual bool has_ended() = 0;
  /// Waits until it is complete. Errors: ConnectionError; std::runtime_error for a message that is longer than its
  /// receive; TimeoutError and those of `poll`, which leave it in flight.
  virtual void wait(std::chrono::milliseconds limit, const Poll& poll) = 0;
};

/// Messages of at most so many bytes are sent before their receive has started. The receiver keeps them until then.
inline constexpr std::size_t kMostEarly = std::size_t{16} << 10;

/// This process's connections to the other ranks of a job, which carry bytes. Thread-safe.
///
/// Between two ranks, the n-th send with a tag completes the n-th receive with that tag, whose memory must be at least
/// as long. A message of more than kMostEarly bytes stays with the sender until its receive has started. Messages with
/// other tags pass it.
class Connections {
 public:
  virtual ~Connections() = default;

  /// Starts a send, which is complete when the network has taken the bytes. Does not wait. Keeps `owner` until the send
  /// is complete or has failed. Errors: ConnectionError.
  virtual std::shared_ptr<Transfer> send(int rank, int tag, std::span<const std::byte> bytes,
                                         std::shared_ptr<const void> owner) = 0;

  /// Starts a receive. Does not wait. REQUIRES: `memory` stays until the receive is complete, its tag has ended, or the
  /// connections are closed. Errors: ConnectionError.
  virtual std::shared_ptr<Transfer> receive(int rank, int tag, std::span<std::byte> memory) = 0;

  /// Ends the tags from `first` to before `last`: drops their receives, and what comes for them. Sends go on. REQUIRES:
  /// these tags are not used here any more.
  virtual void end_tags(int first, int last) = 0;

  /// Closes all connections: transfers in flight fail, here and on the other ranks. Can be repeated.
  virtual void close() noexcept = 0;
};

}  // namespace gpipe
