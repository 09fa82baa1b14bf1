#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <functional>
#include <string>

namespace gpipe {

/// Returns a name that all ranks get in this attempt to run the job, and that no earlier attempt had. torchrun keeps its store
/// when it starts the ranks of a job again, and each host counts the restarts by itself, so counts may differ.
/// REQUIRES: the processes of earlier attempts have ended. Errors: std::runtime_error for ranks that do not come within
/// `limit`, with their numbers, or if rank 0 does not come; those of `poll`, which is called while it waits, unless it is null.
std::string name_attempt(c10d::Store& store, int rank, int size, std::chrono::milliseconds limit,
                         const std::function<void()>& poll);

}  // namespace gpipe
