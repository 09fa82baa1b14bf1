#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

#include "gpipe/ranks.h"

namespace gpipe::examples {

// A training can run in several processes, which torchrun starts. The first one, rank 0, writes the files and prints.
// The others print only errors. Without other processes `ranks` is null.

/// Joins the processes that torchrun has started together with this one. In the others than the first, from now on
/// std::cout prints nothing. Errors: as Ranks::from_environment(); std::invalid_argument for replicas without
/// processes.
std::shared_ptr<Ranks> join_processes(int replicas = 1);

/// Whether this process writes and prints.
bool is_first(const std::shared_ptr<Ranks>& ranks);

/// Calls `work` in the first process. The others wait for it. Errors: as `work`, in the others a
/// std::runtime_error.
void run_first(const std::shared_ptr<Ranks>& ranks, const std::function<void()>& work);

/// Returns this replica's part of a mini-batch: its first image and the one behind its last.
std::pair<std::int64_t, std::int64_t> part_of(const std::shared_ptr<Ranks>& ranks, std::int64_t images);

/// Returns the images of the largest and of the smallest part of a mini-batch.
std::array<std::int64_t, 2> part_sizes(const std::shared_ptr<Ranks>& ranks, std::int64_t images);

}  // namespace gpipe::examples
