#pragma once

#include <c10/core/Device.h>
#include <torch/types.h>

#include <cstdint>
#include <memory>
#include <string>
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

/// A parameter of two stages. The first stage that has it owns it and sums its gradients. It lends the parameter to each
/// other one along an edge, as a skip, and the gradient comes back along the edge.
struct Loan {
  std::string name;  ///< in the owner: "layer.weight"
  int owner = 0;     ///< index of the stage
  int borrower = 0;
  std::size_t lent = 0;      ///< index in the owner's parameters()
  std::size_t borrowed = 0;  ///< index in the borrower's parameters()

  friend bool operator==(const Loan&, const Loan&) = default;
};

/// Returns a loan for each parameter and each stage that has it, except the first.
std::vector<Loan> find_loans(const std::vector<Stage>& stages);

/// Errors: std::invalid_argument for a loan between two devices of this rank, unless the borrower has run_layers, which use
/// stand-ins. `here` says of each stage whether it is on this rank.
void check_loans(const std::vector<Loan>& loans, const std::vector<Stage>& stages, const std::vector<bool>& here);

/// Returns the buffers that stages on one device share and that none of them may write to. Errors: std::invalid_argument
/// for other shared buffers.
SharedBuffers find_shared_buffers(const std::vector<Stage>& stages);

/// Returns the edges between the stages, and sets each stage's skips, borrowed and lent parameters, and receivers, in the
/// order of the edges.
std::vector<Edge> connect_stages(std::vector<Stage>& stages, const std::vector<std::int64_t>& balance,
                                 const std::vector<SkipLink>& skips, const std::vector<Loan>& loans);

/// Drops the layers of the stages that other ranks have. `here` has one entry per stage.
void drop_layers_elsewhere(std::vector<Stage>& stages, const std::vector<bool>& here);

/// Moves the stages' layers to their devices, and each shared parameter to that of the first stage here that has it. Leaves
/// layers alone that are there already.
void move_to_devices(const std::vector<Stage>& stages);

}  // namespace gpipe
