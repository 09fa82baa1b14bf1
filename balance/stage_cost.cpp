#include "balance/stage_cost.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <numeric>
#include <stdexcept>
#include <utility>

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"

namespace gpipe {
namespace {

/// Sums the bytes that an action leaves allocated, by the action that frees them. Searches linearly: there are few.
class HeldBytes {
 public:
  void add(std::int64_t bytes, Kind until, int stage) {
    for (auto& each : held_) {
      if (each.until != until || each.stage != stage) continue;
      each.bytes += bytes;
      return;
    }
    held_.push_back({bytes, until, stage});
  }
  std::vector<Held> take() { return std::move(held_); }

 private:
  std::vector<Held> held_;
};

/// The bytes in use while a stage's layers run one after the other.
class Replay {
 public:
  /// Runs a layer. `extra` is its peak above the bytes before it; `change` is added to these bytes.
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

constexpr double kMinSeconds = 1e-9;                           // of an action, so that actions have an order in time
constexpr std::int64_t kLargeBuffer = std::int64_t{64} << 10;  // bytes, as is_large()

/// Limit on sums of bytes. Small multiples of it still fit into 64 bits.
constexpr double kMaxBytes = std::int64_t{1} << 58;

double all_bytes(const Profile& profile) {
  double sum = 0;
  const auto add = [&](std::initializer_list<std::int64_t> numbers) {
    for (const auto bytes : numbers) sum += std::abs(static_cast<double>(bytes));
  };
  for (const auto& layer : profile.layers) {
    add({layer.parameters, layer.gradients, layer.optimizer, layer.buffers, layer.output, layer.saved,
         layer.forward_extra, layer.stored_extra, layer.backward_extra});
  }
  for (const auto& block : profile.blocks) add({block.bytes});
  for (const auto& skip : profile.skips) add({skip.bytes});
  return sum;
}

/// The stage of a layer; `ends` is as StageCost::ends() returns it.
int stage_of(int layer, const std::vector<int>& ends) {
  return static_cast<int>(std::upper_bound(ends.begin(), ends.end(), layer) - ends.begin());
}

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

void StageCost::check(const RunOptions& options) const {
  if (options.chunks < 1) {
    throw std::invalid_argument(absl::StrFormat("[balance] chunks must be positive, but is %d", options.chunks));
  }
  if (options.chunks * all_bytes_ > kMaxBytes) {
    throw std::invalid_argument(
        absl::StrFormat("[balance] the bytes of %d chunks of a profile of %g bytes overflow; use fewer chunks",
                        options.chunks, all_bytes_));
  }
  if (!(options.bandwidth >= 0)) {
    throw std::invalid_argument(
        absl::StrFormat("[balance] bandwidth must not be negative, but is %g", options.bandwidth));
  }
}

StageCost::StageCost(const Profile& profile)
    : profile_(profile),
      layers_(static_cast<int>(profile.layers.size())),
      all_bytes_(all_bytes(profile)),
      sums_(layers_ + 1),
      blocks_(layers_),
      saved_by_(layers_ + 1),
      saved_for_(layers_ + 1),
      can_cut_(layers_ + 1, true) {
  if (all_bytes_ > kMaxBytes) {
    throw std::invalid_argument(absl::StrFormat("[balance] the sum of the profile's bytes, %g, overflows", all_bytes_));
  }
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
  for (const auto& block : profile_.blocks) {
    blocks_[block.layer].push_back(&block);
    if (block.born != Kind::F || block.until != Kind::B || block.freed_by < block.layer) continue;
    saved_by_[block.layer + 1] += block.bytes;
    saved_for_[block.freed_by + 1] += block.bytes;
  }
  std::partial_sum(saved_by_.begin(), saved_by_.end(), saved_by_.begin());
  std::partial_sum(saved_for_.begin(), saved_for_.end(), saved_for_.begin());
}

bool StageCost::can_cut(const std::vector<std::int64_t>& balance) const {
  std::int64_t end = 0;
  for (const auto layers : balance) {
    if (layers < 1 || layers > layers_ - end) return false;
    end += layers;
    if (!can_cut_[end]) return false;
  }
  return end == layers_;
}

std::vector<std::vector<std::int64_t>> StageCost::near(const std::vector<std::int64_t>& balance, int layers) const {
  static_cast<void>(ends(balance));
  layers = std::min(layers, layers_);
  std::vector<std::vector<std::int64_t>> found;
  for (std::size_t s = 0; s + 1 < balance.size(); ++s) {
    for (int moved = -layers; moved <= layers; ++moved) {
      auto other = balance;
      other[s] += moved;
      other[s + 1] -= moved;
      if (moved != 0 && can_cut(other)) found.push_back(std::move(other));
    }
  }
  return found;
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

std::int64_t StageCost::bytes(int begin, int end, const RunOptions& options) const {
  const auto cell = cell_bytes(begin, end, {begin, end, layers_}, options.copies);
  // After the fill all micro-batches' cells are live. The drain begins with the last one. Before backward k, other
  // stages may still hold the gradients that the k backwards before it sent.
  const std::int64_t chunks = options.chunks;
  const bool last_is_recomputed = options.checkpoint == Checkpoint::kAlways;
  const bool others_are = options.checkpoint != Checkpoint::kNever;
  const auto each = (others_are ? cell.stored : cell.forward).kept();
  const auto& last = last_is_recomputed ? cell.stored : cell.forward;
  const auto backward = [&](bool recomputed, std::int64_t extra) {
    return recomputed ? std::max(cell.recompute.extra, cell.recompute.kept() + extra) : extra;
  };
  const auto first = backward(last_is_recomputed, std::max(cell.first_backward_extra, cell.backward.extra));
  auto peak = (chunks - 1) * each + std::max(last.extra, last.kept() + first);
  for (const std::int64_t k : {std::int64_t{1}, chunks - 1}) {  // linear in between
    if (k < 1 || k >= chunks) continue;
    peak = std::max(peak, (chunks - k) * each + k * cell.backward.kept() + cell.parameters +
                              backward(others_are, cell.backward.extra));
  }
  return static_bytes(begin, end) + peak;
}

// After the first of several backwards, all gradients and the other micro-batches' cells are live. Each backward begins
// with all bytes saved for it: at least the bytes that backwards before `end` free, less those that forwards before
// `first` saved.
std::int64_t StageCost::least_bytes(int first, int end, const RunOptions& options) const {
  const auto saved = std::max(std::int64_t{0}, saved_for_[end] - saved_by_[first]);
  const auto gradients = sums_[end].gradients - sums_[first].gradients;
  const std::int64_t others = options.chunks - 1;
  if (others == 0) return static_bytes(first, end) + std::max(saved, gradients);
  const bool never = options.checkpoint == Checkpoint::kNever;
  return static_bytes(first, end) + (never ? others * saved + std::max(saved, gradients) : saved + gradients);
}

std::int64_t StageCost::bytes_in(int first, int end) const {
  std::int64_t bytes = first > 0 ? profile_.layers[first - 1].output : 0;
  for (const auto& skip : profile_.skips) {
    if (skip.from < first && skip.to >= first && skip.to < end) bytes += skip.bytes;
  }
  return bytes;
}

std::int64_t StageCost::bytes_out(int first, int end) const {
  std::int64_t bytes = end < layers_ ? profile_.layers[end - 1].output : 0;
  for (const auto& skip : profile_.skips) {
    if (skip.from >= first && skip.from < end && skip.to >= end) bytes += skip.bytes;
  }
  return bytes;
}

std::vector<Edge> StageCost::edges(const std::vector<std::int64_t>& balance) const {
  std::vector<LayerLink> links;
  for (const auto& skip : profile_.skips) links.push_back({skip.from, skip.to, skip.name});
  return cut_edges(balance, links);
}

std::vector<int> StageCost::ends(const std::vector<std::int64_t>& balance) const {
  auto ends = stage_ends(balance);
  if (ends.empty() || ends.back() != layers_) {
    throw std::invalid_argument(absl::StrFormat(
        "[balance] balance {%s} does not fit %d layers; give positive numbers of layers that sum to the total",
        absl::StrJoin(balance, ", "), layers_));
  }
  return ends;
}

Costs StageCost::costs(const std::vector<std::int64_t>& balance, const RunOptions& options) const {
  const auto ends = this->ends(balance);
  Costs costs;
  int first = 0;
  for (const int end : ends) {
    const auto& before = sums_[first];
    const auto& after = sums_[end];
    const auto seconds = [](double sum) { return std::max(sum, kMinSeconds); };
    costs.actions.push_back({seconds(after.forward - before.forward), seconds(after.recompute - before.recompute),
                             seconds(after.backward - before.backward), 0, 0});
    costs.stored.push_back(seconds(after.stored - before.stored));
    costs.bytes.push_back(cell_bytes(first, end, ends, options.copies));
    first = end;
  }
  std::vector<std::int64_t> sent;
  for (std::size_t s = 0; s + 1 < ends.size(); ++s) sent.push_back(profile_.layers[ends[s] - 1].output);
  for (const auto& skip : profile_.skips) {
    if (stage_of(skip.from, ends) != stage_of(skip.to, ends)) sent.push_back(skip.bytes);
  }
  for (const auto bytes : sent) {
    costs.edges.push_back(options.bandwidth > 0 ? static_cast<double>(bytes) / options.bandwidth : 0);
  }
  return costs;
}

bool StageCost::copies_inputs(int first, int end) const {
  if (profile_.layers[first].changes_input) return true;
  return std::any_of(profile_.skips.begin(), profile_.skips.end(), [&](const auto& skip) {
    return skip.changed && skip.from < first && skip.to >= first && skip.to < end;
  });
}

// The profile's blocks are those of an unpartitioned pipeline. A cut changes when they are freed: the inputs of a stage
// live until the stage's action has run, or until the recompute of a checkpointed cell. If the stage copies them, they
// live until the copy is made, and the copy is counted as long as the cell lives.
CellBytes StageCost::cell_bytes(int first, int end, const std::vector<int>& ends, bool copies) const {
  const int stage = stage_of(first, ends);
  const auto inside = [&](int layer) { return layer >= first && layer < end; };
  const auto stage_at = [&](int layer) { return layer < 0 ? layer : stage_of(layer, ends); };
  // Change of the stage's bytes by each layer: in forwards with graph, in forwards without, and in backwards.
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
        of_forward.add(bytes, saved && !copies ? Kind::W : Kind::F, stage_at(block->freed_by));
      } else if (saved) {
        of_forward.add(bytes, Kind::W, stage);
        of_recompute.add(bytes, Kind::W, stage);
        by_backward[block->freed_by - first] -= bytes;
      } else {
        by_forward[block->freed_by - first] -= bytes;
      }
      // Without a graph the block lives until its last use.
      const int last_use = std::max(block->reaches, block->popped_by);
      if (last_use == layer) continue;
      by_stored[layer - first] += bytes;
      if (inside(last_use)) {
        by_stored[last_use - first] -= bytes;
      } else if (last_use == layers_) {
        of_stored.add(bytes, Kind::F, Held::kForwards);
      } else {
        const int receiver = stage_of(block->reaches >= end ? end : block->popped_by, ends);
        const bool copied = copies_inputs(ends[receiver - 1], ends[receiver]);
        of_stored.add(bytes, copied || copies ? Kind::F : saved ? Kind::W : Kind::R, receiver);
      }
    }
  }
  Replay forward;
  Replay stored;
  Replay backward;
  Replay first_backward;
  if (copies) {
    const auto entering = bytes_in(first, end);
    of_forward.add(entering, Kind::W, stage);
    of_stored.add(entering, Kind::W, stage);
    forward.run(entering, entering);
    stored.run(entering, entering);
    const auto gradients = bytes_out(first, end);
    backward.run(gradients, gradients);
    first_backward.run(gradients, gradients);
  }
  // A checkpointed cell keeps copies of its buffers, except large ones, which are taken to be constant.
  std::int64_t buffers = 0;
  for (int layer = first; layer < end; ++layer) {
    const auto bytes = profile_.layers[layer].buffers;
    if (bytes < kLargeBuffer) buffers += bytes;
  }
  of_stored.add(buffers, Kind::R, stage);
  stored.run(buffers, buffers);
  of_recompute.add(buffers, Kind::W, stage);
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
  for (int layer = end; layer-- > first;) {
    const auto& of = profile_.layers[layer];
    const auto change = by_backward[layer - first] + of.late_gradients;
    backward.run(of.backward_extra, change);
    first_backward.run(of.backward_extra, change + of.gradients - of.late_gradients);
  }
  return {.forward = {forward.peak(), of_forward.take()},
          .stored = {stored.peak(), of_stored.take()},
          .recompute = {forward.peak() - (copies ? bytes_in(first, end) : 0) + buffers, of_recompute.take()},
          .backward = {backward.peak(), of_backward.take()},
          .first_backward_extra = first_backward.peak(),
          .parameters = sums_[end].gradients - sums_[first].gradients};
}

}  // namespace gpipe
