#include "gpipe/ranks/socket.h"

#include <poll.h>
#include <pthread.h>
#include <unistd.h>

#include <set>

#include "gpipe/base/mutex.h"

namespace gpipe {
namespace {

/// The sockets of this process.
class Registry {
 public:
  // Never destroyed, because the handlers of forks use it.
  static Registry& get() {
    static auto* const registry = new Registry;
    return *registry;
  }

  int add(absl::FunctionRef<int()> make) {
    MutexLock lock(mutex_);
    const int made = make();
    if (made >= 0) open_.insert(made);
    return made;
  }
  void remove(int descriptor) {
    MutexLock lock(mutex_);
    if (open_.erase(descriptor) != 0) close(descriptor);
  }

 private:
  Registry() {
    pthread_atfork([] { get().lock(); }, [] { get().unlock(); }, [] { get().close_all(); });
  }
  void lock() ABSL_NO_THREAD_SAFETY_ANALYSIS { mutex_.lock(); }
  void unlock() ABSL_NO_THREAD_SAFETY_ANALYSIS { mutex_.unlock(); }
  void close_all() ABSL_NO_THREAD_SAFETY_ANALYSIS {
    for (const int descriptor : open_) close(descriptor);
    open_.clear();
    mutex_.unlock();
  }

  Mutex mutex_;
  std::set<int> open_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

Socket::Socket(absl::FunctionRef<int()> make) : descriptor_(Registry::get().add(make)) {}

Socket::~Socket() {
  if (descriptor_ >= 0) Registry::get().remove(descriptor_);
}

bool Socket::is_ended() const {
  pollfd state{.fd = descriptor_, .events = POLLRDHUP, .revents = 0};
  return poll(&state, 1, /*timeout=*/0) == 1;
}

}  // namespace gpipe
