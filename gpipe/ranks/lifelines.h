#pragma once

#include <chrono>
#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "gpipe/base/mutex.h"
#include "gpipe/ranks/connections.h"

namespace gpipe {

/// Notices at any time that a rank is lost, and lets the ranks of a job end together. One connection joins each rank to
/// rank 0. It carries only a byte at the end.
///
/// Thread safety: used by one thread at a time.
class Lifelines {
 public:
  /// The first tag that is free for others.
  static constexpr int kTags = 1;

  /// Calls `on_loss`, on another thread, with each rank that is lost before leave(). It must not throw.
  Lifelines(Connections& connections, int rank, int size, std::function<void(int rank)> on_loss);
  /// REQUIRES: the connections are closed.
  ~Lifelines();
  Lifelines(const Lifelines&) = delete;
  Lifelines& operator=(const Lifelines&) = delete;

  /// Waits until all ranks have called this, for at most `limit`, or until a rank is lost.
  void leave(std::chrono::milliseconds limit) noexcept;

 private:
  struct Line {
    int rank;
    std::byte received;
    std::byte sent;
    std::thread thread;
  };
  void watch(Line& line, Transfer& transfer);

  Connections& connections_;
  const int rank_;
  const std::function<void(int rank)> on_loss_;
  Mutex mutex_;
  CondVar changed_;
  bool leaving_ ABSL_GUARDED_BY(mutex_) = false;
  bool lost_ ABSL_GUARDED_BY(mutex_) = false;
  std::size_t ends_ ABSL_GUARDED_BY(mutex_) = 0;
  std::deque<Line> lines_;  // last, because their threads use the other members
};

}  // namespace gpipe
