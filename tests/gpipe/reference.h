#pragma once

#include "tests/gpipe/helpers.h"

namespace gpipe {

/// A training step on one mini-batch.
struct ReferenceStep {
  Value input;
  std::vector<std::int64_t> sizes = {};  ///< of the micro-batches
  std::vector<int> placement = {};       ///< the worker of each stage; empty: each has its own
  bool ascending = false;                ///< the order of micro-batches in the backward
  int first_micro_batch = 0;             ///< the micro-batches of earlier replicas
  /// Returns the gradients of the joined outputs. Empty if there is a loss.
  std::function<std::vector<Tensor>(const std::vector<Tensor>& outputs)> gradients_of = {};
  /// A loss that is a sum over samples, as the last layer; may be empty.
  LossFunction loss = {};
  Value target = {};
};

/// Runs the model on the calling thread, micro-batch by micro-batch, with the random scopes and boundary nodes of a
/// pipeline of this balance. Runs the backwards, and sums gradients, in the given order of micro-batches. Draws its
/// seed like a pipeline. A pipeline on the CPU must equal it bit by bit. With one stage it is a plain loop over the
/// layers.
///
/// Returns the outputs. Adds gradients to those of the input and the parameters: to a parameter's, with a loss, at once
/// for each micro-batch.
std::vector<Tensor> reference(const Sequential& model, const Balance& balance, const ReferenceStep& step);

}  // namespace gpipe
