#pragma once

#include <functional>
#include <memory>

#include "gpipe/ranks/ranks.h"

namespace gpipe::examples {

// A training can run in several processes, which torchrun starts. The first one, rank 0, writes the files and prints. The others
// print only errors.

/// Joins the processes that torchrun has started together with this one. Null if there are no others. In the others, from now
/// on std::cout prints nothing. Errors: as Ranks::from_environment().
std::shared_ptr<Ranks> join_processes();

/// Whether this process writes and prints.
bool is_first(const std::shared_ptr<Ranks>& ranks);

/// Calls `work` in the first process. The others wait for it. Errors: those of `work`, in the others a std::runtime_error.
void run_first(const std::shared_ptr<Ranks>& ranks, const std::function<void()>& work);

}  // namespace gpipe::examples
