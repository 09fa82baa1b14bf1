#pragma once

#include <ATen/core/Tensor.h>
#include <torch/arg.h>

#include <cstdint>
#include <optional>

#include "gpipe/action.h"
#include "gpipe/api.h"
#include "gpipe/loss_function.h"
#include "gpipe/value.h"

namespace gpipe {

struct StepOptions {
  /// Default: as the loss reduces, if it is a module of torch in tensor_loss(), else kMean.
  TORCH_ARG(std::optional<Reduction>, reduction);
  /// What kMean weights a micro-batch by. Default: the count of a module of torch in tensor_loss(), else the samples.
  TORCH_ARG(CountFunction, count);
  /// Whether the first step() with a LossFunction compares the joined loss and its gradients with those of the whole
  /// mini-batch, for which it keeps all outputs and calls the loss again. Compares again at the first target that may
  /// weight or ignore samples in a new way: unequal shares of zeros, of negative numbers or of NaN in the micro-batches,
  /// unequal means, numbers out of the range so far, another most frequent integer. Looks at a sample of targets on the
  /// CPU only. Make a LossFunction once: one that is made anew is another loss. Throws std::invalid_argument if the
  /// losses differ. Does nothing if the reduction is known or given as kSum, or for a loss that fails on the whole
  /// mini-batch or draws random numbers.
  TORCH_ARG(bool, check) = true;
  /// Multiplies all gradients, for loss scaling. The returned loss is not scaled.
  TORCH_ARG(double, scale) = 1;
  /// Also return the detached output of the model.
  TORCH_ARG(bool, return_output) = false;
  /// Instead of the pipeline's chunks or split_size, for this step. 0: those of the pipeline.
  TORCH_ARG(std::int64_t, chunks) = 0;
  /// Instead of the pipeline's checkpoint mode, for this step.
  TORCH_ARG(std::optional<Checkpoints>, checkpoint);
};

struct StepResult {
  at::Tensor loss;  ///< detached
  Value output;     ///< empty unless StepOptions::return_output
};

/// See check_loss().
struct LossCheck {
  double whole = 0;
  double from_micro_batches = 0;
};

/// Returns the loss of the whole `output`, and the one that step() would join from `chunks` micro-batches. They differ
/// for a loss that does not decompose over samples, such as Dice over the batch or a contrastive loss, for which step()
/// is of no use. Calls the loss without grad mode, on copies of the output. Errors: as for step().
GPIPE_API LossCheck check_loss(const LossFunction& loss, const Value& output, const Value& target, std::int64_t chunks,
                               const StepOptions& options = {});

}  // namespace gpipe
