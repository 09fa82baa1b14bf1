#pragma once

#include "gpipe/ranks/gradient_reduction.h"
#include "gpipe/run/pipeline.h"

namespace gpipe {

/// Says which of this rank's parameters get gradients, and hashes their values. Counterparts must say the same.
std::string describe_trained(const std::vector<ParameterSinks>& stages);

/// The gradients of one backward: of the outputs, which enter it, and of the inputs and parameters, which leave it.
/// Sums the latter over micro-batches and replicas.
///
/// Thread safety: the functions of a stage on its worker; the other functions on the caller's thread, while no worker runs.
class BackwardGradients {
 public:
  /// `sinks`: per stage. `pipeline` and `sinks` must outlive this.
  BackwardGradients(Pipeline& pipeline, const std::vector<ParameterSinks>& sinks, int micro_batches);

  /// Sets the gradients of the outputs, per micro-batch, which the caller's streams may still compute. `share`: this
  /// replica's part of the samples.
  void set_outputs(std::vector<Gradients> gradients, double share);
  /// Returns the gradients of a micro-batch's outputs, once. The last stage's stream waits for them.
  Gradients outputs(int micro_batch);

  /// The sums of a stage's parameters.
  GradientSums& sums(int stage);
  /// Call after each B or W. After the stage's last one, its sums go to the other replicas.
  void end_backward(int stage);
  void set_inputs(int micro_batch, Gradients gradients) { inputs_[micro_batch] = std::move(gradients); }

  /// Adds what the backward has added to `.grad` itself. Replicas refuse that in take().
  void add(const GradientsAside& aside);

  struct Result {
    std::vector<Gradients> inputs;      ///< per micro-batch
    std::vector<Gradients> parameters;  ///< per stage, in the order of ParameterSinks::parameters()
  };
  /// Returns the gradients that leave the backward, once. Errors: as GradientReduction::take().
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

}  // namespace gpipe
