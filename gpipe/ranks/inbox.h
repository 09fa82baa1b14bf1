#pragma once

#include <deque>
#include <map>
#include <vector>

#include "gpipe/ranks/outbox.h"

namespace gpipe {

/// What comes from one rank: into the memory of receives, or kept until one starts. Thread-safe.
class Inbox {
 public:
  /// `socket` must outlive this, and `rank` is at its other end.
  Inbox(int socket, int rank);

  /// As Connections::receive(). Announces the receive in `outbox` if a message for it may wait there.
  std::shared_ptr<Transfer> receive(int tag, std::span<std::byte> memory, Outbox& outbox);
  /// Reads what has come. Tells `outbox` what the other rank has announced. Errors: ConnectionError for the end of the
  /// connection; std::runtime_error for bytes that no rank sends.
  void read(Outbox& outbox);
  /// Drops receives with these tags, and what comes for them.
  void end_tags(int first, int last);
  /// Ends all receives, also later ones except of messages that have come.
  void fail(const std::exception_ptr& error);

 private:
  struct Receive;
  using Bytes = std::vector<std::byte>;
  using Queue = std::deque<std::shared_ptr<Receive>>;
  struct OfTag {
    std::uint64_t receives = 0;
    Queue waiting;            // for a message
    std::deque<Bytes> early;  // messages without a receive
  };
  void fill(Receive& receive, const Bytes& bytes) const;
  void check_fits(std::size_t bytes, const Receive& receive) const;
  void parse(Queue& received, std::vector<Frame>& announced) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void begin_message(const Frame& frame) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void add_to_message(std::span<const std::byte> bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void end_message(Queue& received) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const int socket_;
  const int rank_;
  Mutex mutex_;
  std::map<int, OfTag> tags_ ABSL_GUARDED_BY(mutex_);
  TagRanges ended_ ABSL_GUARDED_BY(mutex_);
  std::exception_ptr error_ ABSL_GUARDED_BY(mutex_);
  Bytes buffer_ ABSL_GUARDED_BY(mutex_);
  std::size_t filled_ ABSL_GUARDED_BY(mutex_) = 0;  // between messages, with a part of a frame
  // The message that is being read: for a receive, or early, or dropped.
  bool in_message_ ABSL_GUARDED_BY(mutex_) = false;
  int tag_ ABSL_GUARDED_BY(mutex_) = 0;
  std::size_t missing_ ABSL_GUARDED_BY(mutex_) = 0;  // bytes
  std::shared_ptr<Receive> receive_ ABSL_GUARDED_BY(mutex_);
  Bytes early_ ABSL_GUARDED_BY(mutex_);
  std::span<std::byte> memory_ ABSL_GUARDED_BY(mutex_);  // for the missing bytes, unless they are dropped
};

}  // namespace gpipe
