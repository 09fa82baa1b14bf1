#pragma once

#include <atomic>
#include <deque>
#include <map>

#include "gpipe/ranks/socket_transfer.h"

namespace gpipe {

/// What stands before each message, or alone.
struct Frame {
  enum Kind : std::uint32_t { kMessage = 0x67706d01, kReady = 0x67706d02 };
  Kind kind;
  std::int32_t tag;
  std::uint64_t number;  // kMessage: of bytes; kReady: of receives that have started
};

/// What is sent to one rank: writes as much as the network takes, and keeps the rest. Thread-safe. Owners of bytes are
/// released without a lock.
class Outbox {
 public:
  /// `socket` must outlive this.
  explicit Outbox(int socket) : socket_(socket) {}

  /// Whether something waits until the network takes it.
  bool has_output() const { return has_output_; }

  /// As Connections::send().
  std::shared_ptr<Transfer> send(int tag, std::span<const std::byte> bytes, std::shared_ptr<const void> owner);
  /// Tells the other rank how many receives with a tag have started.
  void announce(int tag, std::uint64_t receives);
  /// Sends what has waited for so many receives.
  void note_announced(int tag, std::uint64_t receives);
  void write();
  /// Forgets these tags, except messages that have not been sent.
  void end_tags(int first, int last);
  /// Ends all sends, also later ones. Returns false if this was called before.
  bool fail(const std::exception_ptr& error);

 private:
  struct Send;
  using Queue = std::deque<std::shared_ptr<Send>>;
  struct OfTag {
    std::uint64_t sends = 0;
    std::uint64_t announced = 0;  // receives
    Queue waiting;                // for a receive
  };
  Queue flush() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  static void end(const Queue& sends, const std::exception_ptr& error = nullptr);

  const int socket_;
  std::atomic<bool> has_output_ = false;
  Mutex mutex_;
  Queue queue_ ABSL_GUARDED_BY(mutex_);
  std::map<int, OfTag> tags_ ABSL_GUARDED_BY(mutex_);
  TagRanges ended_ ABSL_GUARDED_BY(mutex_);
  std::exception_ptr error_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace gpipe
