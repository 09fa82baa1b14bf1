#include "gpipe/ranks/outbox.h"

#include <sys/socket.h>

#include <algorithm>
#include <utility>

namespace gpipe {

struct Outbox::Send : SocketTransfer {
  Send(const Frame& frame, std::span<const std::byte> bytes, std::shared_ptr<const void> owner)
      : frame(frame), bytes(bytes), owner(std::move(owner)) {}

  const Frame frame;
  const std::span<const std::byte> bytes;
  std::shared_ptr<const void> owner;
  std::size_t written = 0;  // of the frame and the bytes
};

std::shared_ptr<Transfer> Outbox::send(int tag, std::span<const std::byte> bytes, std::shared_ptr<const void> owner) {
  auto made = std::make_shared<Send>(Frame{Frame::kMessage, tag, bytes.size()}, bytes, std::move(owner));
  Queue written;
  {
    MutexLock lock(mutex_);
    if (error_) std::rethrow_exception(error_);
    auto& of_tag = tags_[tag];
    const bool must_wait = ++of_tag.sends > of_tag.announced && bytes.size() > kMostEarly;
    (must_wait || !of_tag.waiting.empty() ? of_tag.waiting : queue_).push_back(made);
    written = flush();
  }
  end(written);
  return made;
}

void Outbox::announce(int tag, std::uint64_t receives) {
  MutexLock lock(mutex_);
  queue_.push_back(std::make_shared<Send>(Frame{Frame::kReady, tag, receives}, std::span<const std::byte>(), nullptr));
}

void Outbox::note_announced(int tag, std::uint64_t receives) {
  MutexLock lock(mutex_);
  if (ended_.contains(tag) && !tags_.contains(tag)) return;
  auto& of_tag = tags_[tag];
  of_tag.announced = std::max(of_tag.announced, receives);
  const auto is_due = [&] {
    const auto number = of_tag.sends - of_tag.waiting.size() + 1;
    return number <= of_tag.announced || of_tag.waiting.front()->bytes.size() <= kMostEarly;
  };
  while (!of_tag.waiting.empty() && is_due()) {
    queue_.push_back(std::move(of_tag.waiting.front()));
    of_tag.waiting.pop_front();
  }
  if (ended_.contains(tag) && of_tag.waiting.empty()) tags_.erase(tag);
}

void Outbox::write() {
  Queue written;
  {
    MutexLock lock(mutex_);
    written = flush();
  }
  end(written);
}

void Outbox::end_tags(int first, int last) {
  MutexLock lock(mutex_);
  ended_.add(first, last);
  for (auto it = tags_.lower_bound(first); it != tags_.end() && it->first < last;) {
    it = it->second.waiting.empty() ? tags_.erase(it) : std::next(it);
  }
}

bool Outbox::fail(const std::exception_ptr& error) {
  Queue failed;
  {
    MutexLock lock(mutex_);
    if (error_) return false;
    error_ = error;
    failed = std::exchange(queue_, {});
    for (auto& [tag, of_tag] : tags_) {
      failed.insert(failed.end(), of_tag.waiting.begin(), of_tag.waiting.end());
      of_tag.waiting.clear();
    }
    has_output_ = false;
  }
  end(failed, error);
  return true;
}

// Returns what is complete. An error of the socket also shows when it is read.
Outbox::Queue Outbox::flush() {
  Queue complete;
  while (!queue_.empty()) {
    auto& send = *queue_.front();
    const auto of_frame = std::min(send.written, sizeof(Frame));
    const auto bytes = send.bytes.subspan(send.written - of_frame);
    auto* const frame = reinterpret_cast<char*>(const_cast<Frame*>(&send.frame));
    iovec parts[] = {{frame + of_frame, sizeof(Frame) - of_frame},
                     {const_cast<std::byte*>(bytes.data()), bytes.size()}};
    msghdr message = {};
    message.msg_iov = parts;
    message.msg_iovlen = 2;
    const auto count = sendmsg(socket_, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (count < 0) break;
    send.written += count;
    if (send.written < sizeof(Frame) + send.bytes.size()) continue;
    complete.push_back(std::move(queue_.front()));
    queue_.pop_front();
  }
  has_output_ = !queue_.empty();
  return complete;
}

void Outbox::end(const Queue& sends, const std::exception_ptr& error) {
  for (const auto& send : sends) {
    send->owner = nullptr;
    send->end(error);
  }
}

}  // namespace gpipe
