#include "gpipe/runtime/channel.h"

#include <cassert>

namespace gpipe {

Channel::Channel(int capacity, int micro_batches) : capacity_(capacity), present_(micro_batches, false) {}

bool Channel::put(int micro_batch) {
  MutexLock lock(mutex_);
  while (held_ == capacity_ && !cancelled_) changed_.wait(mutex_);
  if (cancelled_) return false;
  assert(!present_[micro_batch]);
  present_[micro_batch] = true;
  ++held_;
  changed_.notify_all();
  return true;
}

bool Channel::take(int micro_batch) {
  MutexLock lock(mutex_);
  while (!present_[micro_batch] && !cancelled_) changed_.wait(mutex_);
  if (cancelled_) return false;
  present_[micro_batch] = false;
  --held_;
  changed_.notify_all();
  return true;
}

void Channel::cancel() {
  MutexLock lock(mutex_);
  cancelled_ = true;
  changed_.notify_all();
}

}  // namespace gpipe
