#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "gpipe/run/micro_batch.h"
#include "gpipe/run/mini_batch.h"
#include "gpipe/run/pipeline.h"

namespace gpipe {

// Results of calls get their history in autograd: one node over the inputs and all parameters.

/// Returns the tensors to which a mini-batch has gradients: its inputs and the parameters with sinks. Over ranks, a last one
/// makes every rank run its backward, also if none of its own parameters wants a gradient.
std::vector<at::Tensor> sources_of(const MiniBatch& mini_batch, const Pipeline& pipeline, const Value& input);

/// Attaches the outputs of a forward that want a gradient. Their backward is MiniBatch::backward(). Runs no layer,
/// because an error here would leave buffers changed.
void attach_forward(std::shared_ptr<MiniBatch> mini_batch, std::shared_ptr<Pipeline> pipeline, const Value& input,
                    const std::vector<std::int64_t>& sizes, const Gathered& output);

/// Attaches the loss of a step: its backward hands out the gradients, times the incoming one unless that is `unit`. `sources`:
/// see sources_of(). Takes the outcome's gradients.
void attach_step(MiniBatch::StepOutcome& outcome, std::shared_ptr<Pipeline> pipeline, const Value& input,
                 const std::vector<at::Tensor>& sources, const std::vector<std::int64_t>& sizes,
                 std::shared_ptr<const at::Tensor> unit);

}  // namespace gpipe
