#include "gpipe/runtime/channel.h"

#include <cassert>

namespace gpipe {

Channel::Channel(int capacity, int micro_batches, int spins)
    : capacity_(capacity), spins_(spins), present_(micro_batches) {}

bool Channel::put(int micro_batch) {
  changed_.await(spins_, [&] { return held_ < capacity_ || cancelled_; });
  if (cancelled_) return false;
  assert(!present_[micro_batch]);
  ++held_;
  present_[micro_batch] = true;
  changed_.announce();
  return true;
}

bool Channel::take(int micro_batch) {
  changed_.await(spins_, [&] { return present_[micro_batch] || cancelled_; });
  if (cancelled_) return false;
  present_[micro_batch] = false;
  --held_;
  changed_.announce();
  return true;
}

void Channel::cancel() {
  cancelled_ = true;
  changed_.announce();
}

}  // namespace gpipe
