#pragma once

#include <cstdint>
#include <vector>

#include "balance/profile.h"
#include "gpipe/schedule/footprint.h"
#include "gpipe/schedule/generators.h"
#include "gpipe/schedule/simulator.h"

namespace gpipe {

/// How a cut model is to run.
struct RunOptions {
  int chunks = 1;  ///< micro-batches of the profile's size
  Checkpoint checkpoint = Checkpoint::kExceptLast;
  /// Bytes a second between devices; 0: what is sent is there at once, as between CPU stages.
  double bandwidth = 0;
};

/// What stages of a profiled model cost, for whichever layers they are made of. The profile must outlive it.
class StageCost {
 public:
  explicit StageCost(const Profile& profile);

  int layers() const { return layers_; }

  /// Whether a stage may end before a layer: not where that would part layers that share a parameter.
  bool can_cut_before(int layer) const { return can_cut_[layer]; }
  /// Whether a balance cuts the model, and only there.
  bool can_cut(const std::vector<std::int64_t>& balance) const;

  /// Seconds of the layers first..end-1 for a micro-batch, forward to backward, recomputed ones by their share, with
  /// what enters and its gradient on their way.
  double seconds(int first, int end, const RunOptions& options) const;

  /// The most bytes that such a stage has in use in a step, and the part of them that is always there: parameters,
  /// buffers, what the optimizer keeps. An upper bound, whatever stands before and behind it and however slow that is.
  std::int64_t bytes(int begin, int end, const RunOptions& options) const;
  std::int64_t static_bytes(int first, int end) const;

  /// What enters the layers first..end-1 from before: activation and skips.
  std::int64_t bytes_in(int first, int end) const;

  /// For simulate(): what a balance's stages and edges cost.
  Costs costs(const std::vector<std::int64_t>& balance, double bandwidth) const;
  std::vector<Edge> edges(const std::vector<std::int64_t>& balance) const;

 private:
  /// Whether a stage that begins and ends there works from copies of what enters when it is to be recomputed: it, or one
  /// that it passes it on to, changes some of it in place.
  bool copies_inputs(int first, int end) const;
  /// `ends` says of each stage which layer comes behind it.
  CellBytes cell_bytes(int first, int end, const std::vector<int>& ends) const;

  const Profile& profile_;
  const int layers_;
  std::vector<LayerProfile> sums_;                 ///< of the layers before
  std::vector<std::vector<const Block*>> blocks_;  ///< by layer
  std::vector<bool> can_cut_;
};

}  // namespace gpipe
