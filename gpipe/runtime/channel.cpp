#include "gpipe/runtime/channel.h"

#include <cassert>

namespace gpipe {

Channel::Channel(int micro_batches, int spins) : spins_(spins), present_(micro_batches) {}

void Channel::put(int micro_batch) {
  assert(!present_[micro_batch]);
  present_[micro_batch] = true;
  changed_.announce();
}

bool Channel::take(int micro_batch) {
  changed_.await(spins_, [&] { return present_[micro_batch] || cancelled_; });
  return !cancelled_;
}

void Channel::cancel() {
  cancelled_ = true;
  changed_.announce();
}

}  // namespace gpipe
