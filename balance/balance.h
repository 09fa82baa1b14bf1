#pragma once

#include "balance/cut.h"
#include "balance/profiler.h"

namespace gpipe {

// Profile a model on the sample's device, then cut it. Errors: as profile(), and std::invalid_argument for
// partitions < 1, for more partitions than layers, and for chunks < 1.

/// Returns the balance whose slowest stage is fastest, without checkpointing. The sample is one micro-batch: its size
/// affects the times. On the CPU, ProfileOptions::workers is ignored: `partitions` stages are measured at once.
std::vector<std::int64_t> balance_by_time(int partitions, const Model& model, const Value& sample,
                                          ProfileOptions options = {});

/// Returns the balance whose largest stage needs the fewest bytes in a step. The sample is a mini-batch, which is split
/// into `chunks` micro-batches. `param_scale` is as in ProfileOptions.
///
/// Assumes that all stages use one memory, as on the CPU. For several GPUs call profile() and then the overload in
/// balance/cut.h with RunOptions::copies.
std::vector<std::int64_t> balance_by_size(int partitions, const Model& model, const Value& sample, int chunks = 1,
                                          double param_scale = 2, Checkpoint checkpoint = Checkpoint::kExceptLast);

}  // namespace gpipe
