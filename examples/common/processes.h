#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

#include "gpipe/ranks.h"

namespace gpipe::examples {

// A training can run in several processes, which torchrun starts. The first one, rank 0, writes the files and prints.
// The others print only errors. Without other processes `ranks` is null.

/// Whether this process writes and prints.
inline bool is_first(const std::shared_ptr<Ranks>& ranks) { return !ranks || ranks->rank() == 0; }

/// Calls `work` in the first process. The others wait for it. Errors: as `work`, in the others a
/// std::runtime_error.
inline void run_first(const std::shared_ptr<Ranks>& ranks, const std::function<void()>& work) {
  if (is_first(ranks)) work();
  if (ranks) ranks->share("");
}

/// Returns this replica's part of a mini-batch: its first image and the one behind its last.
inline std::pair<std::int64_t, std::int64_t> part_of(const std::shared_ptr<Ranks>& ranks, std::int64_t images) {
  return ranks ? ranks->part(images) : std::pair<std::int64_t, std::int64_t>(0, images);
}

}  // namespace gpipe::examples
