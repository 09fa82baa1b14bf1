#pragma once

#include <c10/core/Device.h>
#include <torch/types.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "gpipe/autograd/layer.h"
#include "gpipe/autograd/stage.h"
#include "gpipe/schedule/program.h"
#include "gpipe/shared_buffers.h"
#include "skip/layout.h"

namespace gpipe {

/// The steps that make stages from a model. GPipe's constructor calls them in this order.

/// Errors: std::invalid_argument for a module that is a layer twice.
void check_distinct(const std::vector<std::unique_ptr<Layer>>& layers);

/// `devices` has one entry per stage.
std::vector<Stage> cut_into_stages(std::vector<std::unique_ptr<Layer>> layers, const std::vector<std::int64_t>& balance,
                                   const std::vector<torch::Device>& devices);

/// Errors: std::invalid_argument for a parameter that two stages share, because each sums its own gradients.
void check_parameters(const std::vector<Stage>& stages);

/// Returns the buffers that stages on one device share and that none of them may write to. Errors: std::invalid_argument
/// for other shared buffers.
SharedBuffers find_shared_buffers(const std::vector<Stage>& stages);

/// Returns the edges between the stages, and sets each stage's skips and receivers, in the order of the edges.
std::vector<Edge> connect_stages(std::vector<Stage>& stages, const std::vector<std::int64_t>& balance,
                                 const std::vector<SkipLink>& skips);

/// Moves a stage's layers to its device. Leaves layers alone that are there already.
void move_to_device(const Stage& stage);

}  // namespace gpipe
