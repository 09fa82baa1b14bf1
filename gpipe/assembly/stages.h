#pragma once

#include <c10/core/Device.h>
#include <torch/types.h>

#include "gpipe/assembly/workers.h"
#include "gpipe/autograd/stage.h"
#include "gpipe/layer_factory.h"
#include "gpipe/ranks/team.h"

namespace gpipe {

/// A place where a model has a parameter or a buffer. Does not keep the tensor.
struct TensorPlace {
  int stage = 0;
  std::string layer;
  std::string key;  ///< "weight", "child.weight"
  WeakTensor tensor;
  std::size_t first = 0;  ///< index of the first place that has the tensor, whose stage owns it

  std::string name() const { return layer + "." + key; }
};

/// Finds the places that have the same tensor.
class TensorPlaces {
 public:
  /// Adds tensors of a layer. REQUIRES: stages come in order.
  void add(int stage, const std::string& layer, const torch::OrderedDict<std::string, at::Tensor>& tensors);
  const std::vector<TensorPlace>& all() const { return all_; }

 private:
  std::vector<TensorPlace> all_;
  absl::flat_hash_map<const void*, std::size_t> firsts_;  // by tensor
};

/// Returns the places of the parameters of these stages, in order.
std::vector<TensorPlace> places_of_parameters(const std::vector<Stage>& stages);

/// A parameter of two stages. The first stage that has it owns it, and lends it to each other one along an edge.
struct Loan {
  int owner = 0;  ///< index of the stage
  int borrower = 0;
  std::string name;      ///< in the owner: "layer.weight"
  std::string borrowed;  ///< in the borrower

  friend bool operator==(const Loan&, const Loan&) = default;
};

/// Returns a loan for each parameter and each stage that has it, except the first. REQUIRES: stages come in order.
std::vector<Loan> find_loans(const std::vector<TensorPlace>& parameters);

/// A model cut into stages. Those of other ranks have no layers.
struct Assembly {
  std::vector<Stage> stages;
  std::vector<bool> here;  ///< per stage: whether it is on this rank
  std::vector<Edge> edges;
  std::vector<Loan> loans;
  // Of the whole model.
  std::vector<TensorPlace> parameters;
  std::vector<TensorPlace> buffers;
  /// What all ranks must have in common: versions, options, edges, and layers. Empty without ranks.
  Manifest manifest;
};

/// Makes the stages of this rank by the factories, matches the skips and connects the stages. Drops each layer of
/// another rank before the next one is made. `run_layers`: LanguageBinding::run_layers.
///
/// Errors: std::invalid_argument for a module that is a layer twice, skips that do not match, a parameter or a buffer
/// of two devices of this rank (a parameter only without run_layers); the errors of a factory, also told to other
/// ranks.
Assembly assemble(const std::vector<std::int64_t>& balance, const Workers& workers, LayerFactories factories,
                  std::vector<RunLayers> run_layers, const GPipeOptions& options);

/// Moves the stages' layers to their devices. A shared parameter goes to the device of its first stage here.
void move_to_devices(const std::vector<Stage>& stages);

}  // namespace gpipe
