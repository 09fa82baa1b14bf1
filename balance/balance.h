#pragma once

#include "balance/cut.h"
#include "balance/profiler.h"
#include "gpipe/api.h"

namespace gpipe {

// Profile a model on the sample's device, then cut it. Errors: as profile() and as the overloads in balance/cut.h.

/// Returns the balance whose slowest stage is fastest, without checkpointing. The sample is one micro-batch: its size
/// affects the times. On the CPU, ProfileOptions::workers is ignored: `partitions` stages are measured at once.
GPIPE_API std::vector<std::int64_t> balance_by_time(int partitions, const Model& model, const Value& sample,
                                                    ProfileOptions options = {});

/// Returns the balance whose largest stage needs the fewest bytes in a step, with the sample cut into `chunks`.
///
/// Assumes that all stages use one memory, as on the CPU. For several GPUs use the overload with RunOptions::copies.
GPIPE_API std::vector<std::int64_t> balance_by_size(int partitions, const Model& model, const Value& sample,
                                                    int chunks = 1, double param_scale = 2,
                                                    Checkpoint checkpoint = Checkpoint::kExceptLast);

}  // namespace gpipe
