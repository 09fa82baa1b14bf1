#pragma once

#include <cstdint>
#include <vector>

#include "gpipe/gpipe.h"

namespace gpipe {

/// Runs a forward and a backward from gradients of ones. Leaves no gradients on parameters and runs no parameter hooks.
void trial_step(GPipe& pipe, const Value& batch);

/// The same in the order of the pipeline's schedule, with the sum of the outputs as the loss.
void trial_schedule(GPipe& pipe, const Value& batch);

/// Returns the first micro-batch of a mini-batch that is split into `sizes`. Its tensors require grad where the
/// mini-batch's do.
Value first_micro_batch(const Value& batch, const std::vector<std::int64_t>& sizes);

/// Returns a detached copy whose tensors require grad where the value's do.
Value copy_of(const Value& value);

/// The middle value; the upper of the two middle ones for an even count; 0 for an empty list.
double median(std::vector<double> values);

}  // namespace gpipe
