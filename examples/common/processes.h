#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

#include "gpipe/ranks/ranks.h"

namespace gpipe::examples {

// A training can run in several processes, which torchrun starts. The first one, rank 0, writes the files and prints. The others
// print only errors.

/// Joins the processes that torchrun has started together with this one. Null if there are no others. In the others, from now
/// on std::cout prints nothing. Errors: as Ranks::from_environment(); std::invalid_argument for replicas without processes.
std::shared_ptr<Ranks> join_processes(int replicas = 1);

/// Returns the part of a mini-batch that this process's replica trains on: its first image and the one behind its last.
std::pair<std::int64_t, std::int64_t> part_of(const std::shared_ptr<Ranks>& ranks, std::int64_t images);

/// Whether this process writes and prints.
bool is_first(const std::shared_ptr<Ranks>& ranks);

/// Calls `work` in the first process. The others wait for it. Errors: those of `work`, in the others a std::runtime_error.
void run_first(const std::shared_ptr<Ranks>& ranks, const std::function<void()>& work);

}  // namespace gpipe::examples
