#pragma once

#include "gpipe/autograd/batch_statistics.h"
#include "gpipe/autograd/parameter_sinks.h"
#include "gpipe/ranks/gradient_reduction.h"
#include "gpipe/run/step_loss.h"

namespace gpipe {

/// The gradients of one backward: of the outputs, which enter it, and of the inputs and parameters, which leave it, the
/// latter summed over micro-batches and replicas.
///
/// Thread safety: the functions of a stage on its worker; the others on the caller's thread while the workers rest.
class BackwardGradients {
 public:
  /// `sinks`: per stage; must outlive this, as `pipeline` must. `accumulates`: gradients go to a `.grad` of an earlier
  /// step at once where they can (accumulator_of()), because sums beside it would need as much memory again.
  BackwardGradients(Pipeline& pipeline, const std::vector<ParameterSinks>& sinks, int micro_batches,
                    bool accumulates = false);

  /// Sets the gradients of the outputs, per micro-batch. `share`: this replica's part of the samples.
  void set_outputs(std::vector<Gradients> gradients, double share);
  /// Returns the gradients of a micro-batch's outputs, once. The last stage's stream waits for them.
  Gradients outputs(int micro_batch);

  /// The sums of a stage's parameters.
  GradientSums& sums(int stage);
  /// Call after each B or W. After the stage's last one, its sums go to the other replicas.
  void end_backward(int stage);
  void set_inputs(int micro_batch, Gradients gradients) { inputs_[micro_batch] = std::move(gradients); }

  struct Result {
    std::vector<Gradients> inputs;      ///< per micro-batch
    std::vector<Gradients> parameters;  ///< per stage, in the order of ParameterSinks::parameters()
  };
  /// Returns the gradients that leave the backward, once; undefined ones for those that have been accumulated. Errors:
  /// as GradientReduction::take().
  Result take();

 private:
  const std::vector<ParameterSinks>& sinks_;
  std::vector<Gradients> outputs_;          // per micro-batch
  std::vector<StreamEvent> outputs_ready_;  // per gradient of a micro-batch: after the caller's work on its device
  std::vector<Gradients> inputs_;           // per micro-batch
  std::vector<GradientSums> sums_;          // per stage
  std::vector<int> backwards_left_;         // per stage
  std::unique_ptr<GradientReduction> reduction_;  // null without replicas
};

/// What a run of a part of a program returns.
struct Results {
  at::Tensor loss = {};                      ///< of a step, detached
  Gathered outputs = {};                     ///< of a forward, or if the loss keeps them
  BackwardGradients::Result gradients = {};  ///< of a step or a backward

  /// All of its tensors; some can be undefined.
  std::vector<at::Tensor> tensors() const;
};

/// Joins the results of the micro-batches, once. All ranks get the loss, and the outputs, without their values unless
/// Team::shares_outputs(). `loss` may be null.
Results share_results(Pipeline& pipeline, Outputs& outputs, StepLoss* loss);

/// Updates the running statistics of batch norm, on all replicas. `statistics`: per stage, or empty.
void commit_statistics(Pipeline& pipeline, std::vector<BatchStatistics>& statistics);

}  // namespace gpipe
