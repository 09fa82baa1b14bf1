#include "gpipe/runtime/channel.h"

#include <cassert>

namespace gpipe {

void Channel::put(int micro_batch) {
  {
    MutexLock lock(mutex_);
    assert(!present_[micro_batch]);
    present_[micro_batch] = true;
  }
  changed_.notify_all();
}

bool Channel::take(int micro_batch) {
  MutexLock lock(mutex_);
  while (!present_[micro_batch] && !cancelled_) changed_.wait(mutex_);
  return !cancelled_;
}

void Channel::cancel() {
  {
    MutexLock lock(mutex_);
    cancelled_ = true;
  }
  changed_.notify_all();
}

}  // namespace gpipe
