#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "balance/stage_cost.h"

namespace gpipe {
namespace {

/// Sums the bytes that an action leaves allocated, by the action that frees them. Searches linearly: there are few.
class HeldSum {
 public:
  void add(std::int64_t bytes, Kind until, int stage, bool until_own_backward = false) {
    for (auto& each : held_) {
      if (each.until != until || each.stage != stage || each.until_own_backward != until_own_backward) continue;
      each.bytes += bytes;
      return;
    }
    held_.push_back({bytes, until, stage, until_own_backward});
  }
  std::vector<HeldBytes> take() { return std::move(held_); }

 private:
  std::vector<HeldBytes> held_;
};

/// The bytes in use while a stage's layers run one after the other.
class Usage {
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

/// One kind of pass through a stage's layers.
struct Pass : Usage {
  explicit Pass(std::size_t layers) : change(layers) {}

  std::vector<std::int64_t> change;  ///< of the stage's bytes, by layer
  HeldSum held;
};

constexpr std::int64_t kLargeBuffer = std::int64_t{64} << 10;  // bytes, as is_large()

}  // namespace

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
  const auto layers = static_cast<std::size_t>(end - first);
  Pass forward(layers);
  Pass stored(layers);    // a forward without graph
  Pass backward(layers);  // whole; or in two parts:
  Pass input_gradient(layers);
  Pass weight_gradient(layers);
  HeldSum held_by_recompute;
  // Bytes that a layer of this stage saves for its backward, and a later stage for a W.
  std::vector<std::int64_t> shared(layers);
  for (int layer = first; layer < end; ++layer) {
    for (const Block* block : blocks_[layer]) {
      const auto bytes = block->bytes;
      const auto until = block->until == Kind::W ? Kind::W : Kind::I;  // of a backward
      if (block->born != Kind::F) {
        const bool whole = block->born == Kind::B;
        auto& change = whole ? backward.change : input_gradient.change;
        change[layer - first] += bytes;
        if (!inside(block->freed_by)) {
          (whole ? backward.held : input_gradient.held).add(bytes, until, stage_at(block->freed_by));
        } else if (until == Kind::I) {
          change[block->freed_by - first] -= bytes;
        } else {
          input_gradient.held.add(bytes, until, stage);  // the engine holds a W's gradients until the W ends
        }
        continue;
      }
      forward.change[layer - first] += bytes;
      const bool saved = block->until != Kind::F;
      if (!inside(block->freed_by)) {
        forward.held.add(bytes, saved && !copies ? until : Kind::F, stage_at(block->freed_by));
      } else if (saved && until == Kind::W && !inside(block->reaches) && block->reaches < layers_) {
        // Saved by both sides of a cut: here for the backward, there for a W. An R makes it for this side alone.
        copies ? forward.held.add(bytes, Kind::I, stage)
               : forward.held.add(bytes, Kind::W, stage_at(block->reaches), /*until_own_backward=*/true);
        held_by_recompute.add(bytes, Kind::I, stage);
        backward.change[block->freed_by - first] -= bytes;
        if (!copies) shared[block->freed_by - first] += bytes;
      } else if (saved) {
        forward.held.add(bytes, until, stage);
        held_by_recompute.add(bytes, until, stage);
        backward.change[block->freed_by - first] -= bytes;
        (until == Kind::I ? input_gradient.change : weight_gradient.change)[block->freed_by - first] -= bytes;
      } else {
        forward.change[block->freed_by - first] -= bytes;
      }
      // Without a graph the block lives until its last use.
      const int last_use = std::max(block->reaches, block->popped_by);
      if (last_use == layer) continue;
      stored.change[layer - first] += bytes;
      if (inside(last_use)) {
        stored.change[last_use - first] -= bytes;
      } else if (last_use == layers_) {
        stored.held.add(bytes, Kind::F, HeldBytes::kUntilForwardsEnd);
      } else {
        const int receiver = stage_of(block->reaches >= end ? end : block->popped_by, ends);
        const bool copied = copies_inputs(ends[receiver - 1], ends[receiver]);
        stored.held.add(bytes, copied || copies ? Kind::F : saved ? until : Kind::R, receiver);
      }
    }
  }
  Usage first_backward;
  Usage first_weight_gradient;
  if (copies) {
    const auto entering = bytes_in(first, end);
    forward.held.add(entering, Kind::W, stage);
    stored.held.add(entering, Kind::W, stage);
    forward.run(entering, entering);
    stored.run(entering, entering);
    const auto gradients = bytes_out(first, end);
    backward.run(gradients, gradients);
    first_backward.run(gradients, gradients);
    input_gradient.run(gradients, gradients);
  }
  // A checkpointed cell keeps copies of its buffers, except large ones, which are taken to be constant.
  std::int64_t buffers = 0;
  for (int layer = first; layer < end; ++layer) {
    const auto bytes = profile_.layers[layer].buffers;
    if (bytes < kLargeBuffer) buffers += bytes;
  }
  stored.held.add(buffers, Kind::R, stage);
  stored.run(buffers, buffers);
  held_by_recompute.add(buffers, Kind::I, stage);
  if (first > 0 && copies_inputs(first, end)) {
    const auto activation = profile_.layers[first - 1].output;
    const auto skips = bytes_in(first, end) - bytes_borrowed(first, end) - activation;
    stored.held.add(activation, Kind::W, stage);
    stored.held.add(skips, Kind::R, stage);
    stored.run(activation + skips, activation + skips);
  }
  for (int layer = first; layer < end; ++layer) {
    forward.run(profile_.layers[layer].forward_extra, forward.change[layer - first]);
    stored.run(profile_.layers[layer].stored_extra, stored.change[layer - first]);
  }
  for (int layer = end; layer-- > first;) {
    const auto& of = profile_.layers[layer];
    std::int64_t kept_by_backward = 0;
    for (const Block* block : blocks_[layer]) kept_by_backward += block->born == Kind::B ? block->bytes : 0;
    const bool as_last = layer + 1 == end && end < layers_ && !copies;
    const auto backward_extra = as_last ? of.last_backward_extra : of.backward_extra;
    const auto input_gradient_extra = as_last ? of.last_input_gradient_extra : of.input_gradient_extra;
    const auto change = backward.change[layer - first] + of.late_gradients;
    // The gradients of lent parameters are added to the layer's own in new memory.
    std::int64_t arriving = 0;
    for (const auto& tie : profile_.ties) {
      if (tie.layers.front() == layer && tie.layers.back() >= end) arriving += tie.bytes;
    }
    backward.run(backward_extra + arriving, change);
    first_backward.run(backward_extra + arriving, change + of.gradients - of.late_gradients);
    if (splits(first)) {
      input_gradient.run(input_gradient_extra + arriving, input_gradient.change[layer - first]);
    } else {  // a whole backward, while the later stage's W has yet to come
      input_gradient.run(backward_extra + arriving + shared[layer - first], change + shared[layer - first]);
    }
    // A W takes what a whole backward takes above the gradients that it passes on.
    const auto large = of.gradients - of.late_gradients;
    const auto extra = std::max(large, of.backward_extra - kept_by_backward);
    weight_gradient.run(extra, weight_gradient.change[layer - first]);
    first_weight_gradient.run(extra, weight_gradient.change[layer - first] + large);
  }
  auto held_by_backward = backward.held.take();
  auto held_by_input_gradient = splits(first) ? input_gradient.held.take() : held_by_backward;
  return {.forward = {forward.peak(), forward.held.take()},
          .stored = {stored.peak(), stored.held.take()},
          .recompute = {forward.peak() - (copies ? bytes_in(first, end) : 0) + buffers, held_by_recompute.take()},
          .backward = {backward.peak(), std::move(held_by_backward)},
          .input_gradient = {input_gradient.peak(), std::move(held_by_input_gradient)},
          .weight_gradient_extra = weight_gradient.peak(),
          .first_backward_extra = first_backward.peak(),
          .first_weight_gradient_extra = first_weight_gradient.peak(),
          .parameters = sums_[end].gradients - sums_[first].gradients,
          .splits = splits(first)};
}

}  // namespace gpipe
