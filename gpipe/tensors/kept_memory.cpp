#include "gpipe/tensors/kept_memory.h"

#include <malloc.h>

#include <climits>
#include <type_traits>

#include "gpipe/base/mutex.h"

namespace gpipe {
namespace {

constexpr int kMiB = 1 << 20;

void set_malloc(int largest_in_heap, int most_free_at_top, int growth) {
  mallopt(M_MMAP_THRESHOLD, largest_in_heap);
  mallopt(M_TRIM_THRESHOLD, most_free_at_top);
  mallopt(M_TOP_PAD, growth);
}

// Pipelines may outlive static objects that have a destructor.
static_assert(std::is_trivially_destructible_v<Mutex>);
Mutex users_mutex;
int users ABSL_GUARDED_BY(users_mutex) = 0;

}  // namespace

KeptMemory::KeptMemory() {
  MutexLock lock(users_mutex);
  if (users++ == 0) set_malloc(1024 * kMiB, INT_MAX, 64 * kMiB);
}

KeptMemory::~KeptMemory() {
  MutexLock lock(users_mutex);
  if (--users > 0) return;
  set_malloc(32 * kMiB, 64 * kMiB, kMiB / 8);  // where glibc's own adaptation ends
  malloc_trim(0);
}

}  // namespace gpipe
