#pragma once

#include <cstdint>
#include <vector>

#include "balance/cut.h"
#include "balance/profiler.h"

namespace gpipe {

// Balances of a model that is measured first, on the sample's device. Errors: those of profile(), and
// std::invalid_argument for fewer layers than partitions.

/// The balance whose slowest stage is fastest, where nothing is recomputed. The sample is a micro-batch: its size moves
/// the figures. On the CPU, as many stages run at once as there are partitions, whatever the options say.
std::vector<std::int64_t> balance_by_time(int partitions, const Model& model, const Value& sample,
                                          ProfileOptions options = {});

/// The balance whose largest stage needs the fewest bytes for a step on the sample, a mini-batch of which `chunks`
/// micro-batches are made, where stages share a memory: between GPUs, cut a profile with RunOptions::copies.
/// `param_scale` is as in ProfileOptions.
std::vector<std::int64_t> balance_by_size(int partitions, const Model& model, const Value& sample, int chunks = 1,
                                          double param_scale = 2, Checkpoint checkpoint = Checkpoint::kExceptLast);

}  // namespace gpipe
