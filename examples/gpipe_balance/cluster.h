#pragma once

#include <CLI/App.hpp>

#include "examples/gpipe_balance/options.h"

namespace gpipe::examples::balance {

/// Adds the flags of suggest that plan for a cluster. REQUIRES: the verb's other flags are there.
void add_cluster_flags(CLI::App& app, Options& options);

/// Plans for the cluster of the options. Returns the exit code. Errors: those of plan_cluster() and of reading the files.
int run_cluster(const Options& options);

}  // namespace gpipe::examples::balance
