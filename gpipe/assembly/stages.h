#pragma once

#include <c10/core/Device.h>
#include <torch/types.h>

#include <cstdint>
#include <string>
#include <vector>

#include "gpipe/assembly/inventory.h"
#include "gpipe/autograd/stage.h"
#include "gpipe/layer_factory.h"
#include "gpipe/schedule/program.h"
#include "skip/layout.h"

namespace gpipe {

class Ranks;

/// The steps that make stages from a model. GPipe's constructor calls them in this order.

/// Returns stages without layers. `devices` has one entry per stage.
std::vector<Stage> make_stages(const std::vector<std::int64_t>& balance, const std::vector<torch::Device>& devices);

/// Calls the factories in order and gives the layers of this rank to their stages. Drops each other layer before the next one
/// is made. `here` says of each stage whether it is on this rank. Errors: as Inventory::add(); the errors of a factory, which
/// `ranks`, unless null, tells the other ranks.
Inventory fill_stages(std::vector<Stage>& stages, const std::vector<std::int64_t>& balance, LayerFactories factories,
                      const std::vector<bool>& here, Ranks* ranks);

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
std::vector<Loan> find_loans(const std::vector<TensorPlace>& parameters);

/// Errors: std::invalid_argument for a loan between two devices of this rank, unless the borrower has run_layers, which use
/// stand-ins.
void check_loans(const std::vector<Loan>& loans, const std::vector<Stage>& stages, const std::vector<bool>& here);

/// Forbids writes to the buffers that stages on one device share. Errors: std::invalid_argument for a buffer of stages on
/// two devices.
void forbid_writes_to_shared_buffers(const std::vector<TensorPlace>& buffers, std::vector<Stage>& stages);

/// Returns the edges between the stages, and sets each stage's skips and receivers, and the borrowed and lent parameters of
/// those of this rank, in the order of the edges.
std::vector<Edge> connect_stages(std::vector<Stage>& stages, const std::vector<std::int64_t>& balance,
                                 const std::vector<SkipLink>& skips, const std::vector<Loan>& loans,
                                 const std::vector<bool>& here);

/// Moves the stages' layers to their devices, and each shared parameter to that of the first stage here that has it. Leaves
/// layers alone that are there already.
void move_to_devices(const std::vector<Stage>& stages);

}  // namespace gpipe
