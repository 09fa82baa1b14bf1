#include "gpipe/ranks/inbox.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "gpipe/base/checks.h"

namespace gpipe {

struct Inbox::Receive : SocketTransfer {
  explicit Receive(std::span<std::byte> memory) : memory(memory) {}
  const std::span<std::byte> memory;
};

Inbox::Inbox(int socket, int rank) : socket_(socket), rank_(rank), buffer_(std::size_t{64} << 10) {}

std::shared_ptr<Transfer> Inbox::receive(int tag, std::span<std::byte> memory, Outbox& outbox) {
  auto made = std::make_shared<Receive>(memory);
  std::uint64_t receives = 0;
  {
    MutexLock lock(mutex_);
    auto& of_tag = tags_[tag];
    receives = ++of_tag.receives;
    if (!of_tag.early.empty()) {
      fill(*made, of_tag.early.front());
      of_tag.early.pop_front();
      return made;
    }
    if (error_) std::rethrow_exception(error_);
    of_tag.waiting.push_back(made);
  }
  if (memory.size() > kMostEarly) {
    outbox.announce(tag, receives);
    outbox.write();
  }
  return made;
}

void Inbox::read(Outbox& outbox) {
  Queue received;
  std::vector<Frame> announced;
  std::exception_ptr error;
  {
    MutexLock lock(mutex_);
    if (error_) std::rethrow_exception(error_);
    iovec parts[] = {{memory_.data(), memory_.size()}, {buffer_.data() + filled_, buffer_.size() - filled_}};
    msghdr message = {};
    message.msg_iov = parts;
    message.msg_iovlen = 2;
    const auto count = recvmsg(socket_, &message, MSG_DONTWAIT);
    if (count < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (count <= 0) throw ConnectionError(absl::StrCat("the connection to rank ", rank_, " has ended"));
    const auto direct = std::min<std::size_t>(count, memory_.size());
    memory_ = memory_.subspan(direct);
    missing_ -= direct;
    filled_ += count - direct;
    try {
      parse(received, announced);
    } catch (const std::exception&) {
      error = std::current_exception();
    }
  }
  for (const auto& receive : received) receive->end();
  for (const auto& frame : announced) outbox.note_announced(frame.tag, frame.number);
  if (!announced.empty()) outbox.write();
  if (error) std::rethrow_exception(error);
}

void Inbox::end_tags(int first, int last) {
  MutexLock lock(mutex_);
  ended_.add(first, last);
  tags_.erase(tags_.lower_bound(first), tags_.lower_bound(last));
  if (receive_ && tag_ >= first && tag_ < last) {
    receive_ = nullptr;
    memory_ = {};
  }
}

void Inbox::fail(const std::exception_ptr& error) {
  Queue failed;
  {
    MutexLock lock(mutex_);
    if (error_) return;
    error_ = error;
    for (auto& [tag, of_tag] : tags_) {
      failed.insert(failed.end(), of_tag.waiting.begin(), of_tag.waiting.end());
      of_tag.waiting.clear();
    }
    if (receive_) failed.push_back(std::move(receive_));
    memory_ = {};
  }
  for (const auto& receive : failed) receive->end(error);
}

void Inbox::fill(Receive& receive, const Bytes& bytes) const {
  check_fits(bytes.size(), receive);
  if (!bytes.empty()) std::memcpy(receive.memory.data(), bytes.data(), bytes.size());
  receive.end();
}

void Inbox::check_fits(std::size_t bytes, const Receive& receive) const {
  if (bytes <= receive.memory.size()) return;
  throw_error("rank ", rank_, " sent a message of ", bytes, " bytes, but at most ", receive.memory.size(),
              " were due; the ranks must run the same program");
}

void Inbox::parse(Queue& received, std::vector<Frame>& announced) {
  auto left = std::span<const std::byte>(buffer_).first(filled_);
  for (;;) {
    if (in_message_) {
      const auto count = std::min(missing_, left.size());
      add_to_message(left.first(count));
      left = left.subspan(count);
      if (missing_ != 0) break;
      end_message(received);
    }
    if (left.size() < sizeof(Frame)) break;
    Frame frame;
    std::memcpy(&frame, left.data(), sizeof frame);
    left = left.subspan(sizeof frame);
    if (frame.kind == Frame::kMessage) {
      begin_message(frame);
    } else if (frame.kind == Frame::kReady) {
      announced.push_back(frame);
    } else {
      throw_error("rank ", rank_, " sent bytes that are no message; run the same version of gpipe on all ranks");
    }
  }
  std::memmove(buffer_.data(), left.data(), left.size());
  filled_ = left.size();
}

void Inbox::begin_message(const Frame& frame) {
  in_message_ = true;
  tag_ = frame.tag;
  missing_ = frame.number;
  if (ended_.contains(tag_)) return;
  auto& waiting = tags_[tag_].waiting;
  if (!waiting.empty()) {
    check_fits(missing_, *waiting.front());
    receive_ = std::move(waiting.front());
    waiting.pop_front();
    memory_ = receive_->memory.first(missing_);
  } else {
    if (missing_ > kMostEarly) throw_error("rank ", rank_, " sent a message of ", missing_, " bytes too early");
    early_.resize(missing_);
    memory_ = early_;
  }
}

void Inbox::add_to_message(std::span<const std::byte> bytes) {
  const auto kept = std::min(bytes.size(), memory_.size());
  if (kept != 0) std::memcpy(memory_.data(), bytes.data(), kept);
  memory_ = memory_.subspan(kept);
  missing_ -= bytes.size();
}

void Inbox::end_message(Queue& received) {
  in_message_ = false;
  if (receive_) return received.push_back(std::move(receive_));
  auto early = std::exchange(early_, {});
  if (ended_.contains(tag_)) return;
  auto& of_tag = tags_[tag_];
  if (of_tag.waiting.empty()) return of_tag.early.push_back(std::move(early));
  fill(*of_tag.waiting.front(), early);  // a receive that has started meanwhile
  of_tag.waiting.pop_front();
}

}  // namespace gpipe
