#include "tests/ranks/fake_connections.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <tuple>
#include <utility>

namespace gpipe::testing {
namespace {

using Clock = std::chrono::steady_clock;

}  // namespace

/// A send, a receive, or both.
struct FakeNetwork::Message {
  const int from;
  const int to;
  std::span<const std::byte> source;
  std::span<std::byte> target;
  bool matched = false;
  Clock::time_point due;  // of a matched one
  bool done = false;
  bool failed = false;
  std::condition_variable changed;
};

/// What one tag between two ranks carries.
struct FakeNetwork::Queue {
  std::deque<std::shared_ptr<Message>> sends;     // without a receive
  std::deque<std::shared_ptr<Message>> receives;  // without a send
  int sent = 0;
  Clock::time_point last_due;
  std::mt19937_64 random;
};

struct FakeNetwork::State {
  std::mutex mutex;
  std::uint64_t seed;
  std::int64_t longest_delay;  // µs
  std::map<std::tuple<int, int, int>, Queue> queues;
  std::set<std::shared_ptr<Message>> open;  // neither done nor failed
  std::vector<bool> closed;                 // by rank
  std::vector<bool> stopped;                // by rank
  std::condition_variable rank_closed;

  Queue& queue(int from, int to, int tag) {
    const auto [it, is_new] = queues.try_emplace({from, to, tag});
    if (is_new) it->second.random.seed(seed * 1'000'003 + static_cast<std::uint64_t>((tag * 64 + from) * 64 + to));
    return it->second;
  }

  bool is_stopped(const Message& message) const { return stopped[message.from] || stopped[message.to]; }

  void end(const std::shared_ptr<Message>& message, bool done) {
    (done ? message->done : message->failed) = true;
    message->changed.notify_all();
    open.erase(message);
  }

  void close(int rank) {
    if (closed[rank]) return;
    closed[rank] = true;
    const auto messages = open;
    for (const auto& message : messages) {
      if (message->from == rank || message->to == rank) end(message, /*done=*/false);
    }
    rank_closed.notify_all();
  }

  /// Starts one end of a message. `mine` and `theirs` are a queue's lists.
  std::shared_ptr<Message> start(Queue& queue, std::deque<std::shared_ptr<Message>>& mine,
                                 std::deque<std::shared_ptr<Message>>& theirs, int from, int to) {
    if (closed[from] || closed[to]) throw ConnectionError("the connection is closed");
    if (theirs.empty()) {
      mine.push_back(std::shared_ptr<Message>(new Message{.from = from, .to = to}));
      open.insert(mine.back());
      return mine.back();
    }
    auto message = theirs.front();
    theirs.pop_front();
    message->matched = true;
    // Half of the messages come at once, and few late.
    const auto number = queue.random();
    const auto most = number % 8 == 0 ? longest_delay : longest_delay / 8;
    const auto delay = number % 2 == 0 ? 0 : static_cast<std::int64_t>(number / 8 % (most + 1));
    queue.last_due = std::max(queue.last_due, Clock::now() + std::chrono::microseconds(delay));
    message->due = queue.last_due;
    return message;
  }

  void move(const std::shared_ptr<Message>& message) {
    const auto& [source, target] = std::pair(message->source, message->target);
    if (source.size() > target.size()) {
      ADD_FAILURE() << "rank " << message->from << " sent " << source.size() << " bytes, but rank " << message->to
                    << " receives " << target.size();
      return end(message, /*done=*/false);
    }
    if (!source.empty()) std::memcpy(target.data(), source.data(), source.size());
    end(message, /*done=*/true);
  }
};

/// One end of a message.
class FakeNetwork::Ending : public Transfer {
 public:
  Ending(State& state, int rank, std::shared_ptr<Message> message)
      : state_(state), rank_(rank), message_(std::move(message)) {}

  ~Ending() override {
    std::lock_guard lock(state_.mutex);
    if (message_->done || message_->failed) return;
    ADD_FAILURE() << "rank " << rank_ << " dropped a message from rank " << message_->from << " to rank "
                  << message_->to << " before it was complete";
    state_.end(message_, /*done=*/false);
  }

  void wait(std::chrono::milliseconds limit) override {
    std::unique_lock lock(state_.mutex);
    auto& message = *message_;
    for (const auto end = Clock::now() + limit; !message.done;) {
      if (message.failed) throw ConnectionError("the connection was closed");
      const auto now = Clock::now();
      const bool moves = message.matched && !state_.is_stopped(message);
      if (moves && message.due <= now) {
        state_.move(message_);
      } else if (state_.stopped[rank_]) {
        message.changed.wait(lock);
      } else if (now >= end) {
        throw TimeoutError("no answer in time");
      } else {
        message.changed.wait_until(lock, moves ? std::min(end, message.due) : end);
      }
    }
  }

 private:
  State& state_;
  const int rank_;
  const std::shared_ptr<Message> message_;
};

/// The connections of one rank.
class FakeNetwork::End : public Connections {
 public:
  End(State& state, int rank) : state_(state), rank_(rank) {}

  std::shared_ptr<Transfer> send(int rank, int tag, std::span<const std::byte> bytes) override {
    std::lock_guard lock(state_.mutex);
    auto& queue = state_.queue(rank_, rank, tag);
    auto message = state_.start(queue, queue.sends, queue.receives, rank_, rank);
    ++queue.sent;
    message->source = bytes;
    message->changed.notify_all();
    return std::make_shared<Ending>(state_, rank_, std::move(message));
  }

  std::shared_ptr<Transfer> receive(int rank, int tag, std::span<std::byte> bytes) override {
    std::lock_guard lock(state_.mutex);
    auto& queue = state_.queue(rank, rank_, tag);
    auto message = state_.start(queue, queue.receives, queue.sends, rank, rank_);
    message->target = bytes;
    message->changed.notify_all();
    return std::make_shared<Ending>(state_, rank_, std::move(message));
  }

  void close() noexcept override {
    std::lock_guard lock(state_.mutex);
    state_.close(rank_);
  }

 private:
  State& state_;
  const int rank_;
};

FakeNetwork::FakeNetwork(int ranks, std::uint64_t seed, std::chrono::microseconds longest_delay)
    : state_(new State{.seed = seed, .longest_delay = longest_delay.count()}) {
  state_->closed.resize(ranks);
  state_->stopped.resize(ranks);
  for (int r = 0; r < ranks; ++r) connections_.push_back(std::make_unique<End>(*state_, r));
}

FakeNetwork::~FakeNetwork() = default;

void FakeNetwork::stop(int rank) {
  std::lock_guard lock(state_->mutex);
  state_->stopped[rank] = true;
  for (const auto& message : state_->open) message->changed.notify_all();
}

void FakeNetwork::await_the_others_end(int rank) {
  std::unique_lock lock(state_->mutex);
  const auto others = [&] {
    return std::count(state_->closed.begin(), state_->closed.end(), true) - (state_->closed[rank] ? 1 : 0);
  };
  while (others() + 1 < static_cast<std::ptrdiff_t>(state_->closed.size())) state_->rank_closed.wait(lock);
}

int FakeNetwork::sends(int from, int to, int tag) {
  std::lock_guard lock(state_->mutex);
  return state_->queue(from, to, tag).sent;
}

int FakeNetwork::open_receives(int from, int to, int tag) {
  std::lock_guard lock(state_->mutex);
  return static_cast<int>(state_->queue(from, to, tag).receives.size());
}

}  // namespace gpipe::testing
