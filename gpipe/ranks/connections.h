#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "gpipe/base/clock.h"
#include "gpipe/base/mutex.h"
#include "gpipe/ranks/socket.h"

namespace gpipe {

/// A connection to another rank was lost or closed.
class ConnectionError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Another rank did not answer in time.
class TimeoutError : public ConnectionError {
 public:
  explicit TimeoutError(int rank)
      : ConnectionError("rank " + std::to_string(rank) + " did not answer in time"), rank(rank) {}
  const int rank;
};

/// Called every kPollPeriod by a function that waits, on the caller's thread. Its errors end the wait. May be null.
using Poll = std::function<void()>;

/// The time at which a wait of at most `limit` ends that begins now. `limit` may be the largest number.
inline std::chrono::steady_clock::time_point end_after(std::chrono::milliseconds limit) {
  return std::chrono::steady_clock::now() + std::min<std::chrono::milliseconds>(limit, std::chrono::hours(24 * 365));
}

/// A message to send: a text, or a layout and the pieces of memory that it describes, which `owner` keeps. The label is
/// the sender's own.
struct Outgoing {
  std::string text;
  std::uint64_t label = 0;
  bool is_layout = false;
  std::vector<std::span<const std::byte>> pieces = {};
  std::shared_ptr<const void> owner = nullptr;
};

/// The memory that a layout describes.
class Incoming {
 public:
  virtual ~Incoming() = default;
  virtual std::vector<std::span<std::byte>> pieces() = 0;
};

/// A message that has come: a text, or the filled memory of a layout.
struct Received {
  std::uint64_t label = 0;
  std::string text = "";
  std::unique_ptr<Incoming> memory = nullptr;
};

/// What carries messages of one kind from one rank to another, in order.
struct Topic {
  int pipeline = 0;
  int number = 0;
  auto operator<=>(const Topic&) const = default;
};

/// This process's connections to the other ranks of a job. A thread reads what comes, as soon as it comes, and writes
/// what the network has not taken at once. Thread-safe. Invariant: the cause of a failure comes before the connection ends.
class Connections {
 public:
  /// Makes the memory for a layout, on the thread. Errors: std::runtime_error for a layout that is not valid.
  using Allocate = std::function<std::unique_ptr<Incoming>(const std::string& layout)>;
  /// Told on the thread that a connection has ended: why, if the other rank or the bytes that came tell it. It must not
  /// throw.
  using OnEnd = std::function<void(int rank, const std::string& cause)>;

  /// `sockets`: one per rank, with none for the own one. They carry nothing else.
  Connections(std::vector<Socket> sockets, Allocate allocate, OnEnd on_end);
  /// Waits until all has been sent, and after fail() until the others have closed, but not long.
  ~Connections();

  /// Does not wait. Errors: ConnectionError after fail().
  void send(int rank, Topic topic, Outgoing message);
  /// Waits for the topic's next message. Errors: TimeoutError; ConnectionError after fail(); those of `poll`.
  Received receive(int rank, Topic topic, std::chrono::milliseconds limit, const Poll& poll);
  /// Returns the text of a topic's next message, if one has come.
  std::optional<std::string> peek(int rank, Topic topic);
  /// Drops what comes, or has come, for a pipeline.
  void end(int pipeline);

  /// Tells the other ranks the cause of a failure, and closes the connections. Can be repeated.
  void fail(const std::string& cause) noexcept;

 private:
  struct Peer;
  void run();
  bool read(Peer& peer);
  void deliver(Peer& peer);
  void wake();
  std::optional<Received> take(int rank, Topic topic, std::chrono::steady_clock::time_point end);
  bool is_quiet();

  const Allocate allocate_;
  const OnEnd on_end_;
  const int wake_;
  std::atomic<bool> ending_ = false;
  std::vector<std::unique_ptr<Peer>> peers_;  // by rank
  Mutex mutex_;
  CondVar changed_;
  std::map<std::pair<int, Topic>, std::deque<Received>> arrived_ ABSL_GUARDED_BY(mutex_);
  std::set<int> ended_ ABSL_GUARDED_BY(mutex_);  // pipelines
  bool failed_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;  // last, because it uses the other members
};

}  // namespace gpipe
