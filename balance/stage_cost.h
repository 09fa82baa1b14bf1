#pragma once

#include "balance/profile.h"
#include "balance/run_options.h"
#include "gpipe/program.h"

namespace gpipe {

/// The stage of a layer. `ends` is as StageCost::ends() returns it.
int stage_of(int layer, const std::vector<int>& ends);

/// Whether one of the layers first..end-1 reads a skip.
bool is_read(const SkipProfile& skip, int first, int end);

/// Costs of stages of a profiled model, for any range of layers. The profile must outlive this object.
class StageCost {
 public:
  /// Errors: std::invalid_argument for a profile whose bytes would overflow when summed.
  explicit StageCost(const Profile& profile);

  /// Errors: std::invalid_argument for chunks < 1, for so many chunks that their bytes would overflow when summed, and
  /// those of check(Network). The functions below that take RunOptions REQUIRE options that pass.
  void check(const RunOptions& options) const;

  int layers() const { return layers_; }

  /// Whether a stage may begin at a layer: false if the cut would separate layers that must be in one stage.
  bool can_cut_before(int layer) const { return can_cut_[layer]; }
  /// The number of stages if the model is cut wherever it may be.
  int most_stages() const;
  /// Returns the balances that differ from `balance` in one cut, moved to the next layer where a stage may begin. Errors:
  /// as ends().
  std::vector<std::vector<std::int64_t>> near(const std::vector<std::int64_t>& balance) const;

  /// Returns, per stage, the index after its last layer. Errors: as check_balance().
  std::vector<int> ends(const std::vector<std::int64_t>& balance) const;

  // Costs of a stage of the layers first..end-1:

  /// The layers' seconds, saved bytes, and bytes of parameters, gradients, optimizer and buffers.
  LayerProfile sum(int first, int end) const;
  /// Mean seconds per micro-batch: forward, recompute if any, backward, and the transfer of the stage's inputs and
  /// their gradients over the link between the first two workers. REQUIRES: one checkpoint mode for all stages.
  double seconds(int first, int end, const RunOptions& options) const;

  /// Bytes of the gradients of the stage's parameters.
  std::int64_t gradients(int first, int end) const { return sums_[end].gradients - sums_[first].gradients; }
  /// The bytes that stay between steps: parameters, buffers, optimizer state.
  std::int64_t static_bytes(int first, int end) const;
  /// The bytes that sum the gradients over replicas.
  std::int64_t reduction_bytes(int first, int end, const Network& network) const;

  /// Bytes of the stage's inputs for one micro-batch: activation, skips and borrowed parameters.
  std::int64_t bytes_in(int first, int end) const;

  // Inputs of the simulator for a balance.
  /// Without costs of edges. If the options have no placement, each stage has a worker.
  Costs costs(const std::vector<std::int64_t>& balance, const RunOptions& options) const;
  /// The edges between stages on these workers, and the bytes of each for one micro-batch.
  struct SizedEdges {
    std::vector<Edge> edges;
    std::vector<std::int64_t> bytes;
  };
  SizedEdges edges(const std::vector<std::int64_t>& balance, const std::vector<int>& placement) const;

 private:
  /// Whether a backward splits: the inputs of a stage that begins with this layer need gradients.
  bool splits(int first) const;
  /// The part of bytes_in() that is parameters of earlier stages.
  std::int64_t bytes_borrowed(int first, int end) const;
  /// Whether a checkpointed stage copies its inputs, because it or a later stage changes one of them in place.
  bool copies_inputs(int first, int end) const;
  class Cell;
  /// In cell_bytes.cpp. `ends`: as ends() returns it.
  CellBytes cell_bytes(int first, int end, const std::vector<int>& ends, const RunOptions& options) const;

  const Profile& profile_;
  const int layers_;
  double all_bytes_ = 0;
  std::vector<LayerProfile> sums_;                 ///< prefix sums, by layer
  std::vector<std::vector<const Block*>> blocks_;  ///< by layer
  std::vector<bool> can_cut_;
  std::vector<bool> has_w_;  ///< by layer: whether a split backward computes its weights' gradients in the W
};

}  // namespace gpipe
