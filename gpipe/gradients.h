#pragma once

#include "gpipe/api.h"
#include "gpipe/gpipe.h"

namespace gpipe {

// What is done with the gradients of the whole model between a step of the pipeline and one of the optimizer. Over
// ranks, all ranks call these functions in the same order, as forward(), and each changes its own gradients.

/// Clips the gradients by their total norm, as torch::nn::utils::clip_grad_norm_(), with the same bits at any number of
/// ranks. Returns the total norm before clipping, a scalar on the CPU. Errors: std::invalid_argument for a norm that is
/// not positive; std::runtime_error for a total norm that is not finite, if `error_if_nonfinite`; the gradients are
/// then unchanged.
GPIPE_API at::Tensor clip_grad_norm_(GPipeImpl& pipe, double max_norm, double norm_type = 2,
                                     bool error_if_nonfinite = false);

/// Divides the gradients by the scale of their loss (StepOptions::scale). Returns whether all are finite, on all ranks:
/// if not, skip the optimizer's step and lower the scale on all. Errors: std::invalid_argument for a scale <= 0.
GPIPE_API bool unscale_grads_(GPipeImpl& pipe, double scale);

}  // namespace gpipe
