// Tests that run as jobs of several processes.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "gpipe/ranks/ranks.h"

namespace gpipe {

/// The rank of this process in a job of run_job(); -1 in the process that starts the job.
int rank_of_this_process();

/// How a process of a job ended.
struct End {
  int status = 0;  ///< exit status, or minus the signal that ended it
  std::string output;
  double seconds = 0;  ///< from the start of the job
};

/// Runs the current test in `size` new processes of this program, where this function calls `body` and then ends the
/// process: with status 0 if no expectation failed. In the process that starts the job, returns how the processes ended.
/// Those that still run after `limit` are killed.
std::vector<End> run_job(
    int size, const std::function<void(std::shared_ptr<Ranks>)>& body,
    RanksOptions options = RanksOptions().timeout(std::chrono::seconds(20)).join_timeout(std::chrono::seconds(20)),
    std::chrono::seconds limit = std::chrono::seconds(120));

/// The same, and expects each process to end with status 0.
void expect_job(int size, const std::function<void(std::shared_ptr<Ranks>)>& body);

}  // namespace gpipe
