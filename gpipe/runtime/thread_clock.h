#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <cstdlib>
#include <ctime>

namespace gpipe {

/// Tells what the operating system has done with the thread that made it. Not thread-safe.
class ThreadClock {
 public:
  ThreadClock() : file_(open("/proc/thread-self/schedstat", O_RDONLY | O_CLOEXEC)) {}
  ~ThreadClock() {
    if (file_ >= 0) close(file_);
  }
  ThreadClock(const ThreadClock&) = delete;

  struct Times {
    double ran = 0;     ///< seconds on a core
    double queued = 0;  ///< seconds in which the thread could run, but had no core; 0 if the system does not tell

    Times operator-(const Times& other) const { return {ran - other.ran, queued - other.queued}; }
  };

  Times read() const {
    timespec cpu{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &cpu);
    Times times{.ran = static_cast<double>(cpu.tv_sec) + 1e-9 * static_cast<double>(cpu.tv_nsec)};
    char text[64] = {};  // "RAN QUEUED SLICES", in nanoseconds; RAN lags behind by up to a tick
    if (file_ < 0 || pread(file_, text, sizeof text - 1, 0) <= 0) return times;
    char* queued = nullptr;
    std::strtoull(text, &queued, 10);
    times.queued = 1e-9 * static_cast<double>(std::strtoull(queued, nullptr, 10));
    return times;
  }

 private:
  const int file_;
};

}  // namespace gpipe
