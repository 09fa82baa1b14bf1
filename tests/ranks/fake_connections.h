#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

#include "gpipe/ranks/connections.h"

namespace gpipe::testing {

/// The limit of a wait that should not run out of time, and of one that should.
inline constexpr std::chrono::milliseconds kLongLimit{20'000};
inline constexpr std::chrono::milliseconds kShortLimit{20};

/// The connections of all ranks of a job in one process, as slow and as strict as those between processes.
///
/// - A message moves after both its send and its receive have started, and after a random delay. Messages with one tag
///   between two ranks keep their order. Others overtake each other.
/// - A rank that closes its connections, or dies, ends its transfers at both ends.
/// - Nothing moves to or from a rank that has stopped, and its own waits do not run out of time.
/// - What Connections forbids is a failure of the test: a message that is longer than its receive, and a receive that
///   is dropped before it is complete while its tag and its connection are open.
///
/// Thread safety: all functions may be called on any thread. REQUIRES: outlives the transfers.
class FakeNetwork {
 public:
  /// Delays are drawn from the seed, in the order in which the messages of a tag are sent.
  explicit FakeNetwork(int ranks, std::uint64_t seed = 0, std::chrono::microseconds longest_delay = {})
      : seed_(seed), longest_delay_(longest_delay.count()), closed_(ranks), stopped_(ranks) {
    for (int r = 0; r < ranks; ++r) ends_.emplace_back(*this, r);
  }

  Connections& of(int rank) { return ends_[rank]; }

  void stop(int rank) {
    std::lock_guard lock(mutex_);
    stopped_[rank] = true;
    for (const auto& message : open_) message->changed.notify_all();
  }

  /// Waits until all other ranks have closed their connections.
  void await_the_others_end(int rank) {
    std::unique_lock lock(mutex_);
    rank_closed_.wait(lock,
                      [&] { return std::count(closed_.begin(), closed_.end(), false) == (closed_[rank] ? 0 : 1); });
  }

  /// How many sends with a tag have started, and how many receives wait for a send.
  int sends(int from, int to, int tag) {
    std::lock_guard lock(mutex_);
    return queue(from, to, tag).sent;
  }
  int open_receives(int from, int to, int tag) {
    std::lock_guard lock(mutex_);
    return static_cast<int>(queue(from, to, tag).receives.size());
  }

 private:
  using Clock = std::chrono::steady_clock;

  /// A send, a receive, or both.
  struct Message {
    const int from;
    const int to;
    const int tag;
    bool is_received = false;  // whether its receive has started
    std::span<const std::byte> source;
    std::shared_ptr<const void> owner;
    std::span<std::byte> target;
    bool matched = false;
    Clock::time_point due;  // of a matched one
    bool done = false;
    bool failed = false;
    std::condition_variable changed;
  };
  using Messages = std::deque<std::shared_ptr<Message>>;

  /// What one tag between two ranks carries.
  struct Queue {
    Messages sends;     // without a receive
    Messages receives;  // without a send
    int sent = 0;
    Clock::time_point last_due;
    std::mt19937_64 random;
  };

  /// One end of a message.
  class Ending : public Transfer {
   public:
    Ending(FakeNetwork& network, int rank, std::shared_ptr<Message> message)
        : network_(network), rank_(rank), message_(std::move(message)) {}

    ~Ending() override {
      std::lock_guard lock(network_.mutex_);
      if (rank_ == message_->from || message_->done || message_->failed) return;
      ADD_FAILURE() << "rank " << rank_ << " dropped a message from rank " << message_->from
                    << " before it was complete";
      network_.end(message_, /*done=*/false);
    }

    bool has_ended() override {
      std::lock_guard lock(network_.mutex_);
      return message_->done || message_->failed;
    }

    void wait(std::chrono::milliseconds limit, const Poll&) override {
      std::unique_lock lock(network_.mutex_);
      auto& message = *message_;
      for (const auto end = Clock::now() + limit; !message.done;) {
        if (message.failed) throw ConnectionError("the connection was closed");
        const auto now = Clock::now();
        const bool moves = message.matched && !network_.stopped_[message.from] && !network_.stopped_[message.to];
        if (moves && message.due <= now) {
          network_.move(message_);
        } else if (network_.stopped_[rank_]) {
          message.changed.wait(lock);
        } else if (now >= end) {
          throw TimeoutError("no answer in time");
        } else {
          message.changed.wait_until(lock, moves ? std::min(end, message.due) : end);
        }
      }
    }

   private:
    FakeNetwork& network_;
    const int rank_;
    const std::shared_ptr<Message> message_;
  };

  /// The connections of one rank.
  class End : public Connections {
   public:
    End(FakeNetwork& network, int rank) : network_(network), rank_(rank) {}

    std::shared_ptr<Transfer> send(int rank, int tag, std::span<const std::byte> bytes,
                                   std::shared_ptr<const void> owner) override {
      std::lock_guard lock(network_.mutex_);
      auto& queue = network_.queue(rank_, rank, tag);
      auto message = network_.start(queue, queue.sends, queue.receives, rank_, rank, tag);
      ++queue.sent;
      message->source = bytes;
      message->owner = std::move(owner);
      message->changed.notify_all();
      return std::make_shared<Ending>(network_, rank_, std::move(message));
    }

    std::shared_ptr<Transfer> receive(int rank, int tag, std::span<std::byte> bytes) override {
      std::lock_guard lock(network_.mutex_);
      auto& queue = network_.queue(rank, rank_, tag);
      auto message = network_.start(queue, queue.receives, queue.sends, rank, rank_, tag);
      message->target = bytes;
      message->is_received = true;
      message->changed.notify_all();
      return std::make_shared<Ending>(network_, rank_, std::move(message));
    }

    void end_tags(int first, int last) override {
      std::lock_guard lock(network_.mutex_);
      const auto messages = network_.open_;
      for (const auto& message : messages) {
        const bool has_tag = message->to == rank_ && message->tag >= first && message->tag < last;
        if (has_tag && message->is_received) network_.end(message, /*done=*/false);
      }
    }

    void close() noexcept override {
      std::lock_guard lock(network_.mutex_);
      if (network_.closed_[rank_]) return;
      network_.closed_[rank_] = true;
      const auto messages = network_.open_;
      for (const auto& message : messages) {
        if (message->from == rank_ || message->to == rank_) network_.end(message, /*done=*/false);
      }
      network_.rank_closed_.notify_all();
    }

   private:
    FakeNetwork& network_;
    const int rank_;
  };

  // The functions below are called with the mutex.

  Queue& queue(int from, int to, int tag) {
    const auto [it, is_new] = queues_.try_emplace({from, to, tag});
    if (is_new) it->second.random.seed(seed_ * 1'000'003 + static_cast<std::uint64_t>((tag * 64 + from) * 64 + to));
    return it->second;
  }

  /// Starts one end of a message. `mine` and `theirs` are a queue's lists.
  std::shared_ptr<Message> start(Queue& queue, Messages& mine, Messages& theirs, int from, int to, int tag) {
    if (closed_[from] || closed_[to]) throw ConnectionError("the connection is closed");
    if (theirs.empty()) {
      mine.push_back(std::shared_ptr<Message>(new Message{.from = from, .to = to, .tag = tag}));
      open_.insert(mine.back());
      return mine.back();
    }
    auto message = theirs.front();
    theirs.pop_front();
    message->matched = true;
    // Half of the messages come at once, and few late.
    const auto number = queue.random();
    const auto most = number % 8 == 0 ? longest_delay_ : longest_delay_ / 8;
    const auto delay = number % 2 == 0 ? 0 : static_cast<std::int64_t>(number / 8 % (most + 1));
    queue.last_due = std::max(queue.last_due, Clock::now() + std::chrono::microseconds(delay));
    message->due = queue.last_due;
    return message;
  }

  void end(const std::shared_ptr<Message>& message, bool done) {
    (done ? message->done : message->failed) = true;
    message->owner = nullptr;
    message->changed.notify_all();
    open_.erase(message);
  }

  void move(const std::shared_ptr<Message>& message) {
    const auto source = message->source;
    const auto target = message->target;
    const bool fits = source.size() <= target.size();
    if (fits) std::copy(source.begin(), source.end(), target.begin());
    EXPECT_TRUE(fits) << "rank " << message->from << " sent " << source.size() << " bytes, but rank " << message->to
                      << " receives " << target.size();
    end(message, /*done=*/fits);
  }

  const std::uint64_t seed_;
  const std::int64_t longest_delay_;  // µs
  std::mutex mutex_;
  std::map<std::tuple<int, int, int>, Queue> queues_;
  std::set<std::shared_ptr<Message>> open_;  // neither done nor failed
  std::vector<bool> closed_;                 // by rank
  std::vector<bool> stopped_;                // by rank
  std::condition_variable rank_closed_;
  std::deque<End> ends_;  // by rank
};

}  // namespace gpipe::testing
