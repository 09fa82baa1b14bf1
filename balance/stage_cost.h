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
  /// What is sent is copied to the receiver's device, as between GPUs; else the receiver uses the sender's memory.
  bool copies = false;
};

/// What stages of a profiled model cost, for whichever layers they are made of. The profile must outlive it.
class StageCost {
 public:
  /// Errors: std::invalid_argument for a profile of more bytes than can be summed.
  explicit StageCost(const Profile& profile);

  /// Errors: std::invalid_argument for chunks < 1, for so many that their bytes cannot be summed, and for a bandwidth
  /// that is negative or not a number. What takes RunOptions here requires them to pass.
  void check(const RunOptions& options) const;

  int layers() const { return layers_; }

  /// Whether a stage may end before a layer: not where that would part layers that share a parameter.
  bool can_cut_before(int layer) const { return can_cut_[layer]; }
  /// The other balances that cut the model and differ from one by a single cut, at most `layers` layers away. Errors:
  /// those of ends().
  std::vector<std::vector<std::int64_t>> near(const std::vector<std::int64_t>& balance, int layers) const;

  /// The layer behind each stage of a balance. Errors: std::invalid_argument for one that does not cover the model.
  std::vector<int> ends(const std::vector<std::int64_t>& balance) const;

  /// Seconds of the layers first..end-1 for a micro-batch, forward to backward, recomputed ones by their share, with
  /// what enters and its gradient on their way.
  double seconds(int first, int end, const RunOptions& options) const;

  /// The most bytes that such a stage has in use in a step, and the part of them that is always there: parameters,
  /// buffers, what the optimizer keeps. An upper bound, whatever stands before and behind it and however slow that is.
  std::int64_t bytes(int begin, int end, const RunOptions& options) const;
  std::int64_t static_bytes(int first, int end) const;

  /// A lower bound, quick to say: of bytes() of these layers and of any stage that has them and others.
  std::int64_t least_bytes(int first, int end, const RunOptions& options) const;

  /// What enters the layers first..end-1 from before: activation and skips.
  std::int64_t bytes_in(int first, int end) const;

  /// For simulate(): what a balance's stages and edges cost.
  Costs costs(const std::vector<std::int64_t>& balance, const RunOptions& options) const;
  std::vector<Edge> edges(const std::vector<std::int64_t>& balance) const;

 private:
  /// Whether a balance cuts the model, and only where a stage may end.
  bool can_cut(const std::vector<std::int64_t>& balance) const;
  /// What leaves the layers first..end-1 for behind: activation and skips.
  std::int64_t bytes_out(int first, int end) const;
  /// Whether a stage that begins and ends there works from copies of what enters when it is to be recomputed: it, or
  /// one that it passes it on to, changes some of it in place.
  bool copies_inputs(int first, int end) const;
  /// `ends` says of each stage which layer comes behind it.
  CellBytes cell_bytes(int first, int end, const std::vector<int>& ends, bool copies) const;

  const Profile& profile_;
  const int layers_;
  double all_bytes_ = 0;
  std::vector<LayerProfile> sums_;                 ///< of the layers before
  std::vector<std::vector<const Block*>> blocks_;  ///< by layer
  // Bytes that forwards leave for backwards, of the layers before: allocated by those, freed by those.
  std::vector<std::int64_t> saved_by_;
  std::vector<std::int64_t> saved_for_;
  std::vector<bool> can_cut_;
};

}  // namespace gpipe
