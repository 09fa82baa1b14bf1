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

/// A limit that can be added to others.
inline std::chrono::milliseconds at_most_a_year(std::chrono::milliseconds limit) {
  return std::min<std::chrono::milliseconds>(limit, std::chrono::hours(24 * 365));
}

/// The time at which a wait of at most `limit` ends that begins now.
inline std::chrono::steady_clock::time_point end_after(std::chrono::milliseconds limit) {
  return std::chrono::steady_clock::now() + at_most_a_year(limit);
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

/// What carries messages of one kind from one rank to another, in order. The job's topics have pipeline 0.
struct Topic {
  int pipeline = 0;
  int number = 0;
  auto operator<=>(const Topic&) const = default;
};

/// This process's connections to the other ranks of a job, and the first failure of any rank. A thread reads what comes
/// as soon as it comes, and writes what the network has not taken at once. A failure closes the connections: its cause
/// reaches all ranks before. Thread-safe.
class Connections {
 public:
  /// Makes the memory for a layout, on the thread. Errors: std::runtime_error for a layout that is not valid.
  using Allocate = std::function<std::unique_ptr<Incoming>(const std::string& layout)>;

  Connections(int size, Allocate allocate);
  /// Waits until all has been sent, and after a failure until the others have closed, but not long.
  ~Connections();

  /// Adds the connection to a rank, which carries nothing else. Once per rank.
  void add(int rank, Socket socket);
  bool has(int rank) const;

  /// Does not wait. REQUIRES: has(rank). Errors: ConnectionError after a failure.
  void send(int rank, Topic topic, Outgoing message);
  /// Waits for the topic's next message. REQUIRES: has(rank). Errors: TimeoutError; ConnectionError after a failure;
  /// those of `poll`.
  Received receive(int rank, Topic topic, std::chrono::milliseconds limit, const Poll& poll);
  /// Whether a message of a topic has come that has not been received.
  bool has_come(int rank, Topic topic);
  /// Drops what comes, or has come, for a pipeline.
  void end(int pipeline);

  /// Reports a failure of this rank, unless a rank has failed before.
  void fail(const std::string& cause) noexcept { note(cause, /*is_own=*/true); }
  /// The end of a connection is a failure of its rank, until this is called.
  void begin_to_leave() { is_leaving_ = true; }
  /// The first failure that this rank knows; empty if there is none.
  std::string failure() const;
  /// Whether this rank reported it.
  bool is_own() const;
  /// Errors: std::runtime_error if there is a failure; `what` says what it prevents.
  void check(const std::string& what = "a rank has failed") const;
  /// Calls `action` at a later failure, on any thread. It must not throw.
  void on_failure(std::function<void()> action);

 private:
  struct Peer;
  void note(const std::string& cause, bool is_own) noexcept;
  void run();
  bool read(Peer& peer);
  void deliver(Peer& peer);
  void wake();
  std::optional<Received> take(int rank, Topic topic, std::chrono::steady_clock::time_point end);
  bool is_quiet();

  const Allocate allocate_;
  const int wake_;
  std::atomic<bool> is_ending_ = false;
  std::atomic<bool> is_leaving_ = false;
  std::vector<std::unique_ptr<Peer>> peers_;  // by rank
  mutable Mutex mutex_;
  CondVar changed_;
  std::map<std::pair<int, Topic>, std::deque<Received>> arrived_ ABSL_GUARDED_BY(mutex_);
  std::set<int> ended_ ABSL_GUARDED_BY(mutex_);  // pipelines
  std::string failure_ ABSL_GUARDED_BY(mutex_);
  bool is_own_ ABSL_GUARDED_BY(mutex_) = false;
  std::function<void()> on_failure_ ABSL_GUARDED_BY(mutex_);
  std::thread thread_;  // last, because it uses the other members
};

}  // namespace gpipe
