#include "balance/stage_cost.h"

#include <algorithm>
#include <map>
#include <stdexcept>
#include <tuple>

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"

namespace gpipe {
namespace {

/// Collects what an action leaves behind, by the action that ends it.
class HeldBytes {
 public:
  void add(std::int64_t bytes, Kind until, int stage) { bytes_[{until, stage}] += bytes; }

  std::vector<Held> take() const {
    std::vector<Held> held;
    for (const auto& [end, bytes] : bytes_) held.push_back({bytes, end.first, end.second});
    return held;
  }

 private:
  std::map<std::pair<Kind, int>, std::int64_t> bytes_;
};

/// What a stage has in use while its layers run one after the other.
class Replay {
 public:
  /// A layer that needs `extra` while it runs, and leaves so much more, or less, behind.
  void run(std::int64_t extra, std::int64_t change) {
    peak_ = std::max(peak_, now_ + extra);
    now_ += change;
    peak_ = std::max(peak_, now_);
  }
  std::int64_t peak() const { return peak_; }

 private:
  std::int64_t now_ = 0;
  std::int64_t peak_ = 0;
};

double share_recomputed(const RunOptions& options) {
  switch (options.checkpoint) {
    case Checkpoint::kNever:
      return 0;
    case Checkpoint::kExceptLast:
      return (options.chunks - 1.0) / options.chunks;
    case Checkpoint::kAlways:
      break;
  }
  return 1;
}

}  // namespace

StageCost::StageCost(const Profile& profile)
    : profile_(profile),
      layers_(static_cast<int>(profile.layers.size())),
      sums_(layers_ + 1),
      blocks_(layers_),
      can_cut_(layers_ + 1, true) {
  for (int i = 0; i < layers_; ++i) {
    const auto& layer = profile_.layers[i];
    auto& sum = sums_[i + 1] = sums_[i];
    sum.forward += layer.forward;
    sum.stored += layer.stored;
    sum.recompute += layer.recompute;
    sum.backward += layer.backward;
    sum.parameters += layer.parameters;
    sum.gradients += layer.gradients;
    sum.optimizer += layer.optimizer;
    sum.buffers += layer.buffers;
    for (int position = layer.shares_with + 1; position <= i; ++position) can_cut_[position] = false;
  }
  for (const auto& block : profile_.blocks) blocks_[block.layer].push_back(&block);
}

double StageCost::seconds(int first, int end, const RunOptions& options) const {
  const auto& before = sums_[first];
  const auto& after = sums_[end];
  const double share = share_recomputed(options);
  double seconds = (after.backward - before.backward) + (1 - share) * (after.forward - before.forward) +
                   share * (after.stored - before.stored + after.recompute - before.recompute);
  if (options.bandwidth > 0) seconds += 2 * static_cast<double>(bytes_in(first, end)) / options.bandwidth;
  return seconds;
}

std::int64_t StageCost::static_bytes(int first, int end) const {
  const auto& before = sums_[first];
  const auto& after = sums_[end];
  return after.parameters - before.parameters + after.buffers - before.buffers + after.optimizer - before.optimizer;
}

std::int64_t StageCost::bytes(int first, int end, const RunOptions& options) const {
  std::vector<int> stage_of(layers_, 1);
  std::fill(stage_of.begin(), stage_of.begin() + first, 0);
  std::fill(stage_of.begin() + end, stage_of.end(), 2);
  const auto cell = cell_bytes(first, end, stage_of);
  // The fill leaves all micro-batches' cells behind; the drain begins with the last one's.
  const bool stores_last = options.checkpoint != Checkpoint::kAlways;
  const auto last = stores_last ? cell.forward.kept() : cell.stored.kept();
  const auto forward = cell.forward.kept();
  const auto each = options.checkpoint == Checkpoint::kNever ? forward : cell.stored.kept();
  const auto graph = cell.recompute.kept();
  const auto others = static_cast<std::int64_t>(options.chunks - 1) * each;
  auto peak = others + std::max((stores_last ? cell.forward : cell.stored).extra,
                                last + (stores_last ? 0 : graph) + cell.first_backward_extra);
  if (!stores_last) peak = std::max(peak, others + last + cell.recompute.extra);
  if (others > 0) {
    const auto second = cell.parameters + std::max(cell.recompute.extra, graph + cell.backward.extra);
    const auto stored = cell.parameters + cell.backward.extra;
    const auto drained = options.checkpoint == Checkpoint::kNever ? forward + stored : second;
    peak = std::max(peak, others + (options.checkpoint == Checkpoint::kNever ? stored : second));
    // Gradients pile up where the stage before is slower.
    peak = std::max(peak, (options.chunks - 1) * cell.backward.kept() + drained);
  }
  return static_bytes(first, end) + peak;
}

std::int64_t StageCost::bytes_in(int first, int end) const {
  std::int64_t bytes = first > 0 ? profile_.layers[first - 1].output : 0;
  for (const auto& skip : profile_.skips) {
    if (skip.from < first && skip.to >= first && skip.to < end) bytes += skip.bytes;
  }
  return bytes;
}

std::vector<Edge> StageCost::edges(const std::vector<std::int64_t>& balance) const {
  std::vector<LayerLink> links;
  for (const auto& skip : profile_.skips) links.push_back({skip.from, skip.to, skip.name});
  return cut_edges(balance, links);
}

Costs StageCost::costs(const std::vector<std::int64_t>& balance, double bandwidth) const {
  std::vector<int> stage_of;
  for (const auto layers : balance) {
    stage_of.insert(stage_of.end(), std::max<std::int64_t>(layers, 0), stage_of.empty() ? 0 : stage_of.back() + 1);
  }
  const bool positive = std::all_of(balance.begin(), balance.end(), [](auto layers) { return layers > 0; });
  if (!positive || static_cast<int>(stage_of.size()) != layers_) {
    throw std::invalid_argument(
        absl::StrFormat("[balance] {%s} does not cut %d layers: give positive numbers of "
                        "layers that sum to it",
                        absl::StrJoin(balance, ", "), layers_));
  }
  Costs costs;
  int first = 0;
  for (const auto layers : balance) {
    const int end = first + static_cast<int>(layers);
    const auto& before = sums_[first];
    const auto& after = sums_[end];
    costs.actions.push_back(
        {after.forward - before.forward, after.recompute - before.recompute, after.backward - before.backward, 0, 0});
    costs.stored.push_back(after.stored - before.stored);
    costs.bytes.push_back(cell_bytes(first, end, stage_of));
    first = end;
  }
  std::vector<std::int64_t> sent;
  for (std::size_t s = 1, layer = 0; s < balance.size(); ++s) {
    layer += balance[s - 1];
    sent.push_back(profile_.layers[layer - 1].output);
  }
  for (const auto& skip : profile_.skips) {
    if (stage_of[skip.from] != stage_of[skip.to]) sent.push_back(skip.bytes);
  }
  for (const auto bytes : sent) costs.edges.push_back(bandwidth > 0 ? static_cast<double>(bytes) / bandwidth : 0);
  return costs;
}

bool StageCost::copies_inputs(int first, int end) const {
  if (profile_.layers[first].changes_input) return true;
  return std::any_of(profile_.skips.begin(), profile_.skips.end(), [&](const auto& skip) {
    return skip.changed && skip.from < first && skip.to >= first && skip.to < end;
  });
}

// The profile's blocks are those of an unpartitioned pipeline. A cut changes when they are freed: what enters a stage
// is there until the stage's action has run, and, while its cell is to be recomputed, until that.
CellBytes StageCost::cell_bytes(int first, int end, const std::vector<int>& stage_of) const {
  const int stage = stage_of[first];
  // The bounds of the stage that a layer is in.
  const auto copied_at = [&](int layer) {
    const auto begin = std::lower_bound(stage_of.begin(), stage_of.end(), stage_of[layer]);
    const auto after = std::upper_bound(begin, stage_of.end(), stage_of[layer]);
    return copies_inputs(static_cast<int>(begin - stage_of.begin()), static_cast<int>(after - stage_of.begin()));
  };
  const auto inside = [&](int layer) { return layer >= first && layer < end; };
  const auto stage_at = [&](int layer) { return layer < 0 ? layer : stage_of[layer]; };
  // What the stage has in use after each layer, above what before it: forwards that build a graph, and that do not,
  // and backwards.
  std::vector<std::int64_t> by_forward(end - first);
  std::vector<std::int64_t> by_stored(end - first);
  std::vector<std::int64_t> by_backward(end - first);
  HeldBytes of_forward;
  HeldBytes of_stored;
  HeldBytes of_recompute;
  HeldBytes of_backward;
  for (int layer = first; layer < end; ++layer) {
    for (const Block* block : blocks_[layer]) {
      const auto bytes = block->bytes;
      auto& change = (block->born == Kind::F ? by_forward : by_backward)[layer - first];
      change += bytes;
      if (block->born == Kind::B) {
        if (inside(block->freed_by)) {
          by_backward[block->freed_by - first] -= bytes;
        } else {
          of_backward.add(bytes, Kind::I, stage_at(block->freed_by));
        }
        continue;
      }
      const bool saved = block->until == Kind::B;
      if (!inside(block->freed_by)) {
        of_forward.add(bytes, saved ? Kind::W : Kind::F, stage_at(block->freed_by));
      } else if (saved) {
        of_forward.add(bytes, Kind::W, stage);
        of_recompute.add(bytes, Kind::W, stage);
        by_backward[block->freed_by - first] -= bytes;
      } else {
        by_forward[block->freed_by - first] -= bytes;
      }
      // Without a graph it lives until its last use.
      const int last_use = std::max(block->reaches, block->popped_by);
      if (last_use == layer) continue;
      by_stored[layer - first] += bytes;
      if (inside(last_use)) {
        by_stored[last_use - first] -= bytes;
      } else if (last_use == layers_) {
        of_stored.add(bytes, Kind::F, Held::kForwards);
      } else {
        const int receiver = block->reaches >= end ? end : block->popped_by;
        of_stored.add(bytes, copied_at(receiver) ? Kind::F : saved ? Kind::W : Kind::R, stage_of[receiver]);
      }
    }
  }
  Replay forward;
  Replay stored;
  if (first > 0 && copies_inputs(first, end)) {
    const auto activation = profile_.layers[first - 1].output;
    const auto skips = bytes_in(first, end) - activation;
    of_stored.add(activation, Kind::W, stage);
    of_stored.add(skips, Kind::R, stage);
    stored.run(activation + skips, activation + skips);
  }
  for (int layer = first; layer < end; ++layer) {
    forward.run(profile_.layers[layer].forward_extra, by_forward[layer - first]);
    stored.run(profile_.layers[layer].stored_extra, by_stored[layer - first]);
  }
  Replay backward;
  Replay first_backward;
  for (int layer = end; layer-- > first;) {
    const auto& of = profile_.layers[layer];
    const auto change = by_backward[layer - first] + of.late_gradients;
    backward.run(of.backward_extra, change);
    first_backward.run(of.backward_extra, change + of.gradients - of.late_gradients);
  }
  return {.forward = {forward.peak(), of_forward.take()},
          .stored = {stored.peak(), of_stored.take()},
          .recompute = {forward.peak(), of_recompute.take()},
          .backward = {backward.peak(), of_backward.take()},
          .first_backward_extra = first_backward.peak(),
          .parameters = sums_[end].gradients - sums_[first].gradients};
}

}  // namespace gpipe
