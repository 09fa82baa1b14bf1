// Reads a guarded number without its lock. Clang's thread-safety analysis must refuse this file.

#include "gpipe/base/mutex.h"

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
