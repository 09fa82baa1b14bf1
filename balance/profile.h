#pragma once

#include <compare>

#include "gpipe/api.h"
#include "gpipe/simulator.h"

namespace gpipe {

/// Cost of one layer for one micro-batch.
struct LayerProfile {
  std::string name = {};

  // Seconds.
  double forward = 0;  ///< of a forward that builds an autograd graph, as a recompute does
  double stored = 0;   ///< of a forward without graph, in a checkpointed cell
  double backward = 0;
  // Of a backward that is split, in a stage whose inputs need gradients:
  double input_gradient = 0;   ///< in I
  double weight_gradient = 0;  ///< in W

  // Bytes.
  std::int64_t parameters = 0;
  std::int64_t gradients = 0;       ///< of the parameters that require grad
  std::int64_t late_gradients = 0;  ///< the part of `gradients` that is added up at the end of the stage's backward
  std::int64_t optimizer = 0;       ///< the optimizer's state for the parameters
  std::int64_t buffers = 0;
  std::int64_t output = 0;  ///< of the activation passed to the next layer
  std::int64_t saved = 0;   ///< allocated by its forward and kept for a backward

  // Peak bytes while the layer runs, above those in use before.
  std::int64_t forward_extra = 0;
  std::int64_t stored_extra = 0;
  std::int64_t backward_extra = 0;
  std::int64_t first_backward_extra = 0;  ///< in the step's first backward, which allocates the gradient sums
  std::int64_t input_gradient_extra = 0;  ///< in an I

  /// This layer, or a later one that gets the same tensor, changes the layer's input in place.
  bool changes_input = false;
  /// Index of the first layer that must be in the same stage, with all layers between; its own index if there is none.
  /// Such layers share a buffer, or a parameter that stages cannot lend each other.
  int shares_with = 0;

  friend bool operator==(const LayerProfile&, const LayerProfile&) = default;
};

/// Memory that a layer's forward or backward of one micro-batch allocates and does not free.
struct Block {
  // Values of `freed_by`:
  static constexpr int kForwardsEnd = -1;  ///< the end of the step's last forward
  static constexpr int kNever = -2;        ///< nothing within the step

  std::int64_t bytes = 0;
  /// Kind and layer of the pass that allocates the memory: F, B if the backward is whole, or I if it is split.
  Kind born = Kind::F;
  int layer = 0;
  /// Kind and layer of the pass that frees the memory. F; B, which of a split backward is its I; or W, which of a whole
  /// backward is its B. E.g. the input of a layer with weights is freed by its W.
  Kind until = Kind::B;
  int freed_by = 0;
  /// The last layer whose input uses the memory, or `layer`; the number of layers if the model returns it.
  int reaches = 0;
  /// The layers that read the memory as a skip, ascending.
  std::vector<int> readers = {};

  friend auto operator<=>(const Block&, const Block&) = default;
};

/// A skip connection for one micro-batch.
struct SkipProfile {
  std::string name;
  int from = 0;                   ///< index of the layer that stashes it
  std::vector<int> readers = {};  ///< indices of the layers that pop it or peek at it, ascending
  std::int64_t bytes = 0;
  bool changed = false;         ///< in place, after it was read
  bool wants_gradient = false;  ///< of these bytes

  friend bool operator==(const SkipProfile&, const SkipProfile&) = default;
};

/// A parameter of several layers, which stages can lend: the first stage that has it sends it with every micro-batch.
struct TieProfile {
  std::string name;              ///< in the first layer: "layer.weight"
  std::vector<int> layers = {};  ///< indices of the layers that have it, ascending
  std::int64_t bytes = 0;

  friend bool operator==(const TieProfile&, const TieProfile&) = default;
};

/// Costs of a model's layers for micro-batches of one size. Enough to predict a step for every balance.
struct Profile {
  std::int64_t samples = 0;          ///< per micro-batch
  std::string device = {};           ///< where it was measured, e.g. "cpu" or "cuda:0"
  int workers = 1;                   ///< stages that ran at once during the measurement
  int intraop_threads = 1;           ///< per CPU stage during the measurement
  double stage = 0;                  ///< seconds that each action takes in addition to its layers
  bool input_requires_grad = false;  ///< so that a backward splits in the first stage too
  std::vector<LayerProfile> layers = {};
  std::vector<Block> blocks = {};
  std::vector<SkipProfile> skips = {};
  std::vector<TieProfile> ties = {};

  friend bool operator==(const Profile&, const Profile&) = default;
};

/// The longest text that profile_from_json() accepts, in bytes.
inline constexpr std::size_t kMaxProfileJson = std::size_t{16} << 20;

/// Writes a profile as JSON.
GPIPE_API std::string profile_to_json(const Profile& profile);

/// Reads a profile from JSON. Unknown fields are ignored. Limits: kMaxProfileJson, 1e9 seconds per field, and 2^53
/// bytes for the sum of all sizes. Errors: std::invalid_argument with the reason and the place, e.g.
/// "/layers/3/forward". Numbers out of range are errors, never rounded or wrapped.
GPIPE_API Profile profile_from_json(const std::string& text);

}  // namespace gpipe
