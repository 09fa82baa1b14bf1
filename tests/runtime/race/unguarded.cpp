// What clang's thread-safety analysis must refuse: a guarded number, read without its lock.

#include "gpipe/runtime/mutex.h"

namespace gpipe {

class Count {
 public:
  int value() const { return value_; }

 private:
  mutable Mutex mutex_;
  int value_ ABSL_GUARDED_BY(mutex_) = 0;
};

int read(const Count& count) { return count.value(); }

}  // namespace gpipe
