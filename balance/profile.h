#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "gpipe/schedule/action.h"
#include "gpipe/schedule/footprint.h"

namespace gpipe {

/// What one layer costs for one micro-batch.
struct LayerProfile {
  std::string name = {};

  // Seconds.
  double forward = 0;    ///< building its graph
  double stored = 0;     ///< without: in a cell that will be recomputed
  double recompute = 0;  ///< the forward again, building its graph
  double backward = 0;

  // Bytes.
  std::int64_t parameters = 0;
  std::int64_t gradients = 0;       ///< of the parameters that require one
  std::int64_t late_gradients = 0;  ///< the part of them that a stage adds up when its backward has run
  std::int64_t optimizer = 0;       ///< what the optimizer keeps of them
  std::int64_t buffers = 0;
  std::int64_t output = 0;  ///< what it passes on to the next layer
  std::int64_t saved = 0;   ///< what it allocates in its forward and a backward will need

  // The most bytes in use while it runs, above what was before.
  std::int64_t forward_extra = 0;
  std::int64_t stored_extra = 0;
  std::int64_t backward_extra = 0;

  /// Its input is changed in place, by it or by a layer that it is passed on to.
  bool changes_input = false;
  /// The first layer with which it shares a parameter or buffer; itself, when it shares none. They must not be parted.
  int shares_with = 0;

  friend bool operator==(const LayerProfile&, const LayerProfile&) = default;
};

/// Memory that a layer's forward or backward allocates for one micro-batch and leaves behind.
struct Block {
  std::int64_t bytes = 0;
  /// Allocated by this layer's F or B.
  Kind born = Kind::F;
  int layer = 0;
  /// Freed by that layer's F or B; or Held::kForwards, Held::kNeverFreed.
  Kind until = Kind::B;
  int freed_by = 0;
  /// The last layer that it is (part of) the input of; `layer` when it is none's, the number of layers when the model
  /// returns it.
  int reaches = 0;
  /// The last layer that pops it; -1 for none.
  int popped_by = -1;

  friend bool operator==(const Block&, const Block&) = default;
};

/// A skip, by the layers that hold its ends.
struct SkipProfile {
  std::string name;
  int from = 0;
  int to = 0;
  std::int64_t bytes = 0;
  bool changed = false;  ///< in place, by those who get it

  friend bool operator==(const SkipProfile&, const SkipProfile&) = default;
};

/// What a model's layers cost for micro-batches of one size: from which every cut can be predicted.
struct Profile {
  std::int64_t samples = 0;  ///< of a micro-batch
  std::string device = {};   ///< where it was measured, as "cpu" or "cuda:0"
  int workers = 1;           ///< how many stages ran at once while it was measured
  int intraop_threads = 1;
  std::vector<LayerProfile> layers = {};
  std::vector<Block> blocks = {};
  std::vector<SkipProfile> skips = {};

  friend bool operator==(const Profile&, const Profile&) = default;
};

/// A profile as JSON, for people and for files, and back. Errors: std::invalid_argument that says what is wrong with
/// the text, and where, as "/layers/3/forward". No number is rounded or wrapped to fit. Fields that a profile does not
/// have are ignored. At most 16 MiB are read, 1e9 seconds per field, and 2^53 bytes in all fields together.
std::string profile_to_json(const Profile& profile);
Profile profile_from_json(const std::string& text);

}  // namespace gpipe
