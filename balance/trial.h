#pragma once

#include <cstdint>
#include <vector>

#include "gpipe/gpipe.h"

namespace gpipe {

/// A step that leaves no gradients and runs no hooks: forward, and backward from ones.
void trial_step(GPipe& pipe, const Value& batch);

/// The first micro-batch of a mini-batch that is cut into those sizes, requiring grad where that does.
Value first_micro_batch(const Value& batch, const std::vector<std::int64_t>& sizes);

/// A copy without history, requiring grad where the value does.
Value copy_of(const Value& value);

/// The middle value; of an even number the upper one; 0 of none.
double median(std::vector<double> values);

}  // namespace gpipe
