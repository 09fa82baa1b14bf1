#pragma once

#include <deque>
#include <string>
#include <vector>

#include "gpipe/ranks/connections.h"

namespace gpipe {

/// A message to send. The layout tells the receiver what memory it needs; it is not empty. The values are bytes whose
/// number follows from the layout. The pieces are the tensors' memory, which `owner` keeps.
struct Outgoing {
  std::string layout;
  std::string values;
  std::vector<std::span<const std::byte>> pieces;
  std::shared_ptr<const void> owner;
};

/// The memory of a message that is received.
class Incoming {
 public:
  virtual ~Incoming() = default;
  virtual std::span<std::byte> values() = 0;
  virtual std::vector<std::span<std::byte>> pieces() = 0;
};

/// Makes the memory for a layout. Errors: std::runtime_error for a layout that is not valid.
using Allocate = std::function<std::unique_ptr<Incoming>(std::string_view layout)>;

/// The layout of the last message at one position of a wire. Both ends keep it: a layout travels only when it changes.
struct LastLayout {
  std::string layout;
  std::size_t values = 0;           ///< bytes
  std::vector<std::size_t> pieces;  ///< bytes of each
  bool known = false;

  /// Whether the pieces travel with the header: a second message would cost more than the copies.
  bool is_small() const;
};

/// A wire's tags: for headers with small tensors, for tensors of the last layout, and for tensors of a new layout.
inline constexpr int kTagsPerWire = 3;

/// The end of a wire that sends. A wire carries messages from one worker to another on another rank, in order.
///
/// Invariant: for each message the receiver has posted the memory that follows from the last layout. A message that
/// differs completes it with nothing, and travels with the third tag.
///
/// Thread safety: used by one thread at a time.
class WireSender {
 public:
  /// `limit`: the longest time until a message is delivered.
  WireSender(Connections& connections, int peer, int first_tag, std::chrono::milliseconds limit);

  /// Sends without waiting. The connections keep `message.owner` until the message is delivered. The receiver checks
  /// `label`. Errors: ConnectionError; TimeoutError for an earlier message.
  void send(LastLayout& last, std::uint64_t label, Outgoing message);

  /// Waits until all messages are delivered and their owners released. Errors: as send().
  void drain(std::chrono::milliseconds limit);

 private:
  struct Sent {
    std::chrono::steady_clock::time_point end;
    std::shared_ptr<Transfer> transfer;
  };
  void start(int tag, std::span<const std::byte> bytes, std::shared_ptr<const void> owner);

  Connections& connections_;
  const int peer_;
  const int first_tag_;
  const std::chrono::milliseconds limit_;
  std::uint64_t sequence_ = 0;
  std::deque<Sent> sent_;  // not known to be complete
};

/// The most bytes of messages that a WireReceiver has posted memory for, if none has more than `message` bytes.
std::size_t most_posted(std::size_t message);

/// The end of a wire that receives. Thread safety: used by one thread at a time.
class WireReceiver {
 public:
  WireReceiver(Connections& connections, int peer, int first_tag, std::chrono::milliseconds limit, Allocate allocate);
  /// REQUIRES: all announced messages have been received, or the tags have ended, or the connections are closed.
  ~WireReceiver();

  /// Announces `messages` with these last layouts, and posts memory for the first ones. A lost connection is an error
  /// of receive(). REQUIRES: all announced before are received; the layouts stay valid until these are.
  void expect(std::deque<LastLayout>& layouts, std::size_t messages);

  /// Whether the next message has begun to arrive, or cannot.
  bool has_next() const;
  /// Waits for the next message. Errors: ConnectionError; std::runtime_error for another label or a malformed message;
  /// those of `poll`.
  std::unique_ptr<Incoming> receive(std::uint64_t label, const Poll& poll = nullptr);

 private:
  struct Posted;
  void post();
  void receive_changed(Posted& posted, std::uint64_t layout_bytes, std::uint64_t values_bytes, const Poll& poll);

  Connections& connections_;
  const int peer_;
  const int first_tag_;
  const std::chrono::milliseconds limit_;
  const Allocate allocate_;
  std::uint64_t sequence_ = 0;
  std::deque<LastLayout*> expected_;  // not posted yet
  std::deque<std::unique_ptr<Posted>> posted_;
  std::size_t posted_bytes_ = 0;
};

}  // namespace gpipe
