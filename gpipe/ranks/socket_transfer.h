#pragma once

#include <exception>
#include <map>

#include "gpipe/base/mutex.h"
#include "gpipe/ranks/connections.h"

namespace gpipe {

/// A transfer that another thread ends.
class SocketTransfer : public Transfer {
 public:
  bool has_ended() override {
    MutexLock lock(mutex_);
    return ended_;
  }

  void wait(std::chrono::milliseconds limit, const Poll& poll) override {
    const auto end = end_after(limit);
    while (!await_until(poll ? std::min(end, end_after(kPollPeriod)) : end)) {
      if (std::chrono::steady_clock::now() >= end) throw TimeoutError("another rank did not answer in time");
      if (poll) poll();
    }
  }

  /// Ends it, with an error if it has failed.
  void end(const std::exception_ptr& error = nullptr) {
    {
      MutexLock lock(mutex_);
      ended_ = true;
      error_ = error;
    }
    changed_.notify_all();
  }

 private:
  bool await_until(std::chrono::steady_clock::time_point end) {
    MutexLock lock(mutex_);
    while (!ended_ && std::chrono::steady_clock::now() < end) changed_.wait_until(mutex_, end);
    if (error_) std::rethrow_exception(error_);
    return ended_;
  }

  Mutex mutex_;
  CondVar changed_;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  std::exception_ptr error_ ABSL_GUARDED_BY(mutex_);
};

/// Disjoint ranges of tags. Adjacent ones take the place of one.
class TagRanges {
 public:
  void add(int first, int last) {
    auto next = ranges_.upper_bound(first);
    if (next != ranges_.end() && next->first == last) {
      last = next->second;
      next = ranges_.erase(next);
    }
    const bool extends = next != ranges_.begin() && std::prev(next)->second == first;
    (extends ? std::prev(next)->second : ranges_[first]) = last;
  }
  bool contains(int tag) const {
    const auto next = ranges_.upper_bound(tag);
    return next != ranges_.begin() && tag < std::prev(next)->second;
  }

 private:
  std::map<int, int> ranges_;  // from the first tag to the one behind the last
};

}  // namespace gpipe
