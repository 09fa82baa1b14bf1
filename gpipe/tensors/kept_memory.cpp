#include "gpipe/tensors/kept_memory.h"

#include <malloc.h>

#include <climits>

#include "gpipe/base/mutex.h"

namespace gpipe {
namespace {

constexpr int kMiB = 1 << 20;

void set_malloc(int largest_in_heap, int most_free_at_top, int growth) {
  mallopt(M_MMAP_THRESHOLD, largest_in_heap);
  mallopt(M_TRIM_THRESHOLD, most_free_at_top);
  mallopt(M_TOP_PAD, growth);
}

struct Users {
  Mutex mutex;
  int count ABSL_GUARDED_BY(mutex) = 0;
};

Users& users() {
  static Users& it = *new Users;  // pipelines may outlive static objects
  return it;
}

}  // namespace

KeptMemory::KeptMemory() {
  MutexLock lock(users().mutex);
  if (users().count++ == 0) set_malloc(1024 * kMiB, INT_MAX, 64 * kMiB);
}

KeptMemory::~KeptMemory() {
  MutexLock lock(users().mutex);
  if (--users().count > 0) return;
  set_malloc(32 * kMiB, 64 * kMiB, kMiB / 8);  // where glibc's own adaptation ends
  malloc_trim(0);
}

}  // namespace gpipe
