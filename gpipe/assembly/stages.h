#pragma once

#include <c10/core/Device.h>
#include <torch/types.h>

#include <map>

#include "gpipe/autograd/stage.h"
#include "gpipe/layer_factory.h"
#include "gpipe/options.h"
#include "gpipe/ranks/meeting.h"
#include "gpipe/schedule/program.h"
#include "skip/layout.h"

namespace gpipe {

class Ranks;

/// A place where a model has a parameter or a buffer. Does not keep the tensor.
struct TensorPlace {
  int stage = 0;
  std::string layer;
  std::string key;  ///< "weight", "child.weight"
  WeakTensor tensor;
  std::size_t first = 0;   ///< index of the first place that has the tensor, whose stage owns it
  std::size_t number = 0;  ///< index among the stage's distinct tensors

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
  absl::flat_hash_map<const void*, std::size_t> latest_;  // index of the tensor's last place
  std::size_t of_stage_ = 0;                              // tensors
};

/// Returns the places of the parameters of these stages, in order.
std::vector<TensorPlace> places_of_parameters(const std::vector<Stage>& stages);

/// What must be known of all layers of a model, also of those that other ranks have. Keeps no layer.
class Inventory {
 public:
  /// Adds the model's next layer. Errors: std::invalid_argument for a module that is a layer already.
  void add(int stage, const Layer& layer);

  const std::vector<TensorPlace>& parameters() const { return parameters_.all(); }
  const std::vector<TensorPlace>& buffers() const { return buffers_.all(); }
  /// The skips that the layers declare.
  const std::vector<SkipDeclaration>& skips() const { return skips_; }
  /// Each layer's name, parameters and buffers with their types and shapes, and which parameters are frozen.
  const std::vector<std::string>& descriptions() const { return descriptions_; }
  /// A hash of each layer's parameters; 0 where it is not known. Leaves out parameters that layers share.
  std::vector<std::uint64_t> values() const;

 private:
  std::map<std::weak_ptr<torch::nn::Module>, std::string, std::owner_less<>> names_;
  TensorPlaces parameters_;
  TensorPlaces buffers_;
  std::vector<SkipDeclaration> skips_;
  std::vector<std::string> descriptions_;
  // Of each of `parameters_`: its layer's index, and a hash.
  std::vector<std::pair<std::size_t, std::uint64_t>> values_;
};

/// Returns what all ranks must have in common: versions, options, edges, and layers. Other replicas than the first need
/// not have its values, because they take them.
Manifest manifest_of(const std::vector<std::int64_t>& balance, const std::vector<Edge>& edges,
                     const Inventory& inventory, const GPipeOptions& options);

/// The steps that make stages from a model. GPipe's constructor calls them in this order.

/// Calls the factories in order, notes their layers in the inventory, and gives those of this rank to their stages. Drops each
/// other layer before the next one is made. `devices` and `here`: of each stage, and whether it is on this rank. Errors: as
/// Inventory::add(); the errors of a factory, which `ranks`, unless null, tells the other ranks.
std::vector<Stage> make_stages(const std::vector<std::int64_t>& balance, const std::vector<torch::Device>& devices,
                               LayerFactories factories, const std::vector<bool>& here, Ranks* ranks,
                               Inventory& inventory);

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

/// Errors: std::invalid_argument for a loan between two devices of this rank, unless run_layers use a stand-in.
void check_loans(const std::vector<Loan>& loans, const std::vector<Stage>& stages, const std::vector<bool>& here);

/// Forbids writes to buffers that stages on one device share. Errors: std::invalid_argument if they are on two devices.
void forbid_writes_to_shared_buffers(const std::vector<TensorPlace>& buffers, std::vector<Stage>& stages);

/// Returns the edges between the stages, and sets each stage's skips and receivers, and the borrowed and lent parameters of
/// those of this rank, in the order of the edges.
std::vector<Edge> connect_stages(std::vector<Stage>& stages, const std::vector<std::int64_t>& balance,
                                 const std::vector<int>& placement, const std::vector<SkipLink>& skips,
                                 const std::vector<Loan>& loans, const std::vector<bool>& here);

/// Moves the stages' layers to their devices. A shared parameter goes to the device of the first stage here that has it.
void move_to_devices(const std::vector<Stage>& stages);

}  // namespace gpipe
