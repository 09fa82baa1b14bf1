#include "balance/balance.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "balance/trial.h"
#include "gpipe/run/micro_batch.h"

namespace gpipe {

std::vector<std::int64_t> balance_by_time(int partitions, const Model& model, const Value& sample,
                                          ProfileOptions options) {
  check_stages(partitions, static_cast<int>(model.named_layers().size()));
  const auto& tensors = sample.tensors();
  if (!tensors.empty() && tensors.front().defined() && tensors.front().is_cpu()) options.workers(partitions);
  return balance_by_time(profile(model, sample, options), partitions, {.checkpoint = Checkpoint::kNever});
}

std::vector<std::int64_t> balance_by_size(int partitions, const Model& model, const Value& sample, int chunks,
                                          double param_scale, Checkpoint checkpoint) {
  check_stages(partitions, static_cast<int>(model.named_layers().size()));
  if (chunks < 1) throw std::invalid_argument("[balance] chunks must be positive, but is " + std::to_string(chunks));
  const auto sizes = micro_batch_sizes(batch_size(sample), chunks, /*split_size=*/0);
  // The bytes that operators allocate depend on their number of threads, so measure with those of a stage.
  const int threads = std::max(1, at::get_num_threads() / partitions);
  const auto options = ProfileOptions().param_scale(param_scale).seconds(0).repeats(1).intraop_threads(threads);
  return balance_by_size(profile(model, first_micro_batch(sample, sizes), options), partitions,
                         {.chunks = static_cast<int>(sizes.size()), .checkpoint = checkpoint});
}

}  // namespace gpipe
