#include "gpipe/ranks/connections.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "gpipe/base/checks.h"

namespace gpipe {

// Not in the anonymous namespace, because Connections::Peer has members of these types.

/// What stands before each message's text.
struct MessageFrame {
  enum Kind : std::uint64_t { kText = 0x67706d01, kLayout, kFailure };
  Kind kind;
  std::int32_t pipeline;
  std::int32_t topic;
  std::uint64_t text_bytes;
  std::uint64_t label;
};

/// A message that has not been written.
struct Sending {
  MessageFrame frame;
  Outgoing message;
  std::vector<std::span<const std::byte>> parts = {};
  std::size_t part = 0;    // the next to write
  std::size_t offset = 0;  // written of it
};

namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t kBuffer = std::size_t{64} << 10;
constexpr std::size_t kPartsAtOnce = 64;
constexpr std::chrono::milliseconds kLastPatience{500};

std::unique_ptr<Sending> to_sending(MessageFrame::Kind kind, Topic topic, Outgoing message) {
  auto made = std::make_unique<Sending>(
      Sending{{kind, topic.pipeline, topic.number, message.text.size(), message.label}, std::move(message)});
  made->parts.push_back(std::as_bytes(std::span(&made->frame, 1)));
  made->parts.push_back(std::as_bytes(std::span(made->message.text)));
  for (const auto piece : made->message.pieces) {
    if (!piece.empty()) made->parts.push_back(piece);
  }
  return made;
}

}  // namespace

/// The connection to one rank.
struct Connections::Peer {
  explicit Peer(int rank) : rank(rank), buffer(kBuffer) {}

  using Messages = std::deque<std::unique_ptr<Sending>>;

  /// Writes as much as the network takes. Returns what is complete, to be released without the lock.
  Messages flush() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    Messages complete;
    while (!outbox.empty()) {
      auto& next = *outbox.front();
      iovec parts[kPartsAtOnce];
      msghdr message = {};
      message.msg_iov = parts;
      for (auto p = next.part; p < next.parts.size() && message.msg_iovlen < kPartsAtOnce; ++p) {
        const auto rest = next.parts[p].subspan(p == next.part ? next.offset : 0);
        parts[message.msg_iovlen++] = {const_cast<std::byte*>(rest.data()), rest.size()};
      }
      auto count = sendmsg(socket.get(), &message, MSG_DONTWAIT | MSG_NOSIGNAL);
      if (count < 0) break;  // an error also shows when the socket is read
      for (next.offset += count; next.part < next.parts.size() && next.offset >= next.parts[next.part].size();) {
        next.offset -= next.parts[next.part++].size();
      }
      if (next.part < next.parts.size()) continue;
      complete.push_back(std::move(outbox.front()));
      outbox.pop_front();
    }
    has_output = !outbox.empty();
    if (is_closing && outbox.empty()) shutdown(socket.get(), SHUT_WR);
    return complete;
  }

  /// Sends the cause of a failure after what has been written in part, and nothing else.
  void close(const std::string& cause) {
    Messages dropped;
    Messages written;
    MutexLock lock(mutex);
    if (!is_added || std::exchange(is_closing, true)) return;
    dropped.swap(outbox);
    if (!dropped.empty() && (dropped.front()->part > 0 || dropped.front()->offset > 0)) {
      outbox.push_back(std::move(dropped.front()));
    }
    outbox.push_back(to_sending(MessageFrame::kFailure, {}, {.text = cause}));
    written = flush();
  }

  const int rank;
  Socket socket;  // does not change after is_added
  std::atomic<bool> is_added = false;
  std::atomic<bool> is_open = false;  // what comes
  std::atomic<bool> has_output = false;
  Mutex mutex;
  bool is_closing ABSL_GUARDED_BY(mutex) = false;
  Messages outbox ABSL_GUARDED_BY(mutex);

  // What comes. Used by the thread only.
  std::vector<std::byte> buffer;
  std::size_t filled = 0;  // of the buffer
  std::optional<MessageFrame> frame;
  Received message;
  std::vector<std::span<std::byte>> missing;  // what is left of the text, then of the pieces
  std::size_t next = 0;                       // of `missing`
};

Connections::Connections(int size, Allocate allocate)
    : allocate_(std::move(allocate)), wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (wake_ < 0) throw ConnectionError(absl::StrCat("no event can be made: ", std::strerror(errno)));
  for (int r = 0; r < size; ++r) peers_.push_back(std::make_unique<Peer>(r));
  if (size > 1) thread_ = std::thread([this] { run(); });
}

Connections::~Connections() {
  for (const auto end = end_after(kLastPatience); !is_quiet() && Clock::now() < end;) {
    MutexLock lock(mutex_);
    changed_.wait_until(mutex_, std::min(end, end_after(std::chrono::milliseconds(1))));
  }
  is_ending_ = true;
  wake();
  if (thread_.joinable()) thread_.join();
  close(wake_);
}

bool Connections::has(int rank) const { return peers_.at(rank)->is_added; }

void Connections::add(int rank, Socket socket) {
  auto& peer = *peers_.at(rank);
  {
    MutexLock lock(peer.mutex);
    peer.socket = std::move(socket);
    peer.is_added = peer.is_open = true;
  }
  if (const auto cause = failure(); !cause.empty()) peer.close(cause);
  wake();
}

bool Connections::is_quiet() {
  MutexLock lock(mutex_);
  const bool has_failed = !failure_.empty();
  return std::ranges::none_of(peers_,
                              [&](const auto& peer) { return peer->is_open && (has_failed || peer->has_output); });
}

void Connections::wake() {
  const std::uint64_t one = 1;
  static_cast<void>(write(wake_, &one, sizeof one));  // fails only if it is awake
}

void Connections::send(int rank, Topic topic, Outgoing message) {
  auto& peer = *peers_.at(rank);
  const auto kind = message.is_layout ? MessageFrame::kLayout : MessageFrame::kText;
  auto made = to_sending(kind, topic, std::move(message));
  Peer::Messages written;
  {
    MutexLock lock(peer.mutex);
    if (peer.is_closing) throw ConnectionError("the connections were closed");
    peer.outbox.push_back(std::move(made));
    if (!peer.has_output) written = peer.flush();
  }
  if (peer.has_output) wake();
}

void Connections::note(const std::string& cause, bool is_own) noexcept {
  std::function<void()> on_failure;
  {
    MutexLock lock(mutex_);
    if (!failure_.empty()) return;
    failure_ = cause;
    is_own_ = is_own;
    on_failure.swap(on_failure_);
  }
  changed_.notify_all();
  for (const auto& peer : peers_) peer->close(cause);
  wake();
  if (on_failure) on_failure();
}

std::string Connections::failure() const {
  MutexLock lock(mutex_);
  return failure_;
}

bool Connections::is_own() const {
  MutexLock lock(mutex_);
  return is_own_;
}

void Connections::check(const std::string& what) const {
  if (const auto cause = failure(); !cause.empty()) throw_error(what, ": ", cause);
}

void Connections::on_failure(std::function<void()> action) {
  MutexLock lock(mutex_);
  on_failure_ = std::move(action);
}

std::optional<Received> Connections::take(int rank, Topic topic, Clock::time_point end) {
  MutexLock lock(mutex_);
  for (auto& queue = arrived_[{rank, topic}];; changed_.wait_until(mutex_, end)) {
    if (!queue.empty()) {
      auto message = std::move(queue.front());
      queue.pop_front();
      return message;
    }
    if (!failure_.empty()) throw ConnectionError("the connections were closed");
    if (!peers_[rank]->is_open) throw ConnectionError(absl::StrCat("rank ", rank, " has ended"));
    if (Clock::now() >= end) return std::nullopt;
  }
}

Received Connections::receive(int rank, Topic topic, std::chrono::milliseconds limit, const Poll& poll) {
  for (const auto end = end_after(limit);;) {
    auto message = take(rank, topic, poll ? std::min(end, end_after(kPollPeriod)) : end);
    if (message) return *std::move(message);
    if (Clock::now() >= end) throw TimeoutError(rank);
    if (poll) poll();
  }
}

bool Connections::has_come(int rank, Topic topic) {
  MutexLock lock(mutex_);
  const auto found = arrived_.find({rank, topic});
  return found != arrived_.end() && !found->second.empty();
}

void Connections::end(int pipeline) {
  decltype(arrived_) dropped;
  MutexLock lock(mutex_);
  ended_.insert(pipeline);
  for (auto next = arrived_.begin(); next != arrived_.end();) {
    const auto each = next++;
    if (each->first.second.pipeline == pipeline) dropped.insert(arrived_.extract(each));
  }
}

void Connections::run() {
  std::vector<pollfd> states(peers_.size() + 1);
  while (!is_ending_) {
    for (std::size_t r = 0; r < peers_.size(); ++r) {
      const auto& peer = peers_[r];
      states[r] = {.fd = peer->is_open ? peer->socket.get() : -1, .events = POLLIN, .revents = 0};
      if (peer->has_output) states[r].events |= POLLOUT;
    }
    states.back() = {.fd = wake_, .events = POLLIN, .revents = 0};
    poll(states.data(), states.size(), /*timeout=*/-1);
    std::uint64_t count = 0;
    if (states.back().revents != 0) static_cast<void>(::read(wake_, &count, sizeof count));
    for (std::size_t r = 0; r < peers_.size(); ++r) {
      if (states[r].revents == 0) continue;
      auto& peer = *peers_[r];
      if ((states[r].revents & POLLOUT) != 0) {
        Peer::Messages written;
        MutexLock lock(peer.mutex);
        written = peer.flush();
      }
      if ((states[r].revents & ~POLLOUT) == 0) continue;
      try {
        if (read(peer)) continue;
        if (!is_leaving_) {
          note(absl::StrCat("rank ", r, " was lost: its process has ended, or the network has failed"),
               /*is_own=*/false);
        }
      } catch (const std::exception& error) {
        note(error.what(), /*is_own=*/false);
      }
      MutexLock lock(mutex_);
      peer.is_open = false;
      changed_.notify_all();
    }
  }
}

// Reads what has come. Returns false at the end of the connection.
bool Connections::read(Peer& peer) {
  iovec parts[] = {{nullptr, 0}, {peer.buffer.data() + peer.filled, kBuffer - peer.filled}};
  if (peer.next < peer.missing.size()) parts[0] = {peer.missing[peer.next].data(), peer.missing[peer.next].size()};
  msghdr message = {};
  message.msg_iov = parts;
  message.msg_iovlen = 2;
  const auto count = recvmsg(peer.socket.get(), &message, MSG_DONTWAIT);
  if (count < 0 && (errno == EAGAIN || errno == EINTR)) return true;
  if (count <= 0) return false;
  const auto direct = std::min<std::size_t>(count, parts[0].iov_len);
  if (direct != 0) peer.missing[peer.next] = peer.missing[peer.next].subspan(direct);
  peer.filled += count - direct;
  auto left = std::span<const std::byte>(peer.buffer).first(peer.filled);
  const auto fill = [&](std::span<std::byte>& to) {
    const auto bytes = std::min(to.size(), left.size());
    if (bytes != 0) std::memcpy(to.data(), left.data(), bytes);
    to = to.subspan(bytes);
    left = left.subspan(bytes);
    return to.empty();
  };
  for (;;) {
    if (!peer.frame) {
      if (left.size() < sizeof(MessageFrame)) break;
      std::memcpy(&peer.frame.emplace(), left.data(), sizeof(MessageFrame));
      left = left.subspan(sizeof(MessageFrame));
      if (peer.frame->kind < MessageFrame::kText || peer.frame->kind > MessageFrame::kFailure) {
        throw_error("rank ", peer.rank, " sent bytes that are no message; run the same version of gpipe on all ranks");
      }
      peer.message.text.resize(peer.frame->text_bytes);
      peer.missing = {std::as_writable_bytes(std::span(peer.message.text))};
      peer.next = 0;
    }
    while (peer.next < peer.missing.size() && fill(peer.missing[peer.next])) {
      if (peer.next++ != 0 || peer.frame->kind != MessageFrame::kLayout) continue;
      peer.message.memory = allocate_(peer.message.text);
      for (const auto piece : peer.message.memory->pieces()) peer.missing.push_back(piece);
    }
    if (peer.next < peer.missing.size()) break;
    deliver(peer);
  }
  std::memmove(peer.buffer.data(), left.data(), left.size());
  peer.filled = left.size();
  return true;
}

void Connections::deliver(Peer& peer) {
  const auto frame = *std::exchange(peer.frame, std::nullopt);
  auto message = std::exchange(peer.message, {});
  if (frame.kind == MessageFrame::kFailure) return note(message.text, /*is_own=*/false);
  message.label = frame.label;
  MutexLock lock(mutex_);
  if (!failure_.empty() || ended_.contains(frame.pipeline)) return;
  arrived_[{peer.rank, {frame.pipeline, frame.topic}}].push_back(std::move(message));
  changed_.notify_all();
}

}  // namespace gpipe
