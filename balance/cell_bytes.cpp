#include <algorithm>

#include "balance/stage_cost.h"
#include "gpipe/tensors/parcel.h"

namespace gpipe {
/// Counts what the passes of one cell allocate. The profile's blocks describe an unpartitioned pipeline. A cut changes
/// when they are freed: the inputs of a stage live until its action has run, or until the recompute of a checkpointed
/// cell. If the stage copies them, which it does where `copies` and the sender is another worker, they live until the
/// copy is made, and the copy is counted as long as the cell lives.
class StageCost::Cell {
  /// One kind of pass through the layers first..end-1, which run one after the other.
  class Pass {
   public:
    Pass(int first, int end) : first_(first), changes_(end - first) {}

    /// By how much a layer changes the stage's bytes.
    std::int64_t& change(int layer) { return changes_[layer - first_]; }

    /// Adds bytes that the pass leaves allocated, by the action that frees them. Searches linearly: there are few.
    void hold(std::int64_t bytes, Until until, int stage, bool until_own_backward = false) {
      for (auto& each : held_) {
        if (each.until != until || each.stage != stage || each.until_own_backward != until_own_backward) continue;
        each.bytes += bytes;
        return;
      }
      held_.push_back({bytes, until, stage, until_own_backward});
    }

    /// Runs a layer. `extra` is its peak above the bytes before it; `change` is added to these bytes.
    void run(std::int64_t extra, std::int64_t change) {
      peak_ = std::max({peak_, now_ + extra, now_ + change});
      now_ += change;
    }

    std::int64_t peak() const { return peak_; }
    const std::vector<HeldBytes>& held() const { return held_; }

   private:
    const int first_;
    std::vector<std::int64_t> changes_;
    std::vector<HeldBytes> held_;
    std::int64_t now_ = 0;
    std::int64_t peak_ = 0;
  };

 public:
  Cell(const StageCost& cost, int first, int end, const std::vector<int>& ends, const RunOptions& options)
      : cost_(cost), first_(first), end_(end), ends_(ends), options_(options), stage_(stage_of(first, ends)) {}

  CellBytes bytes() {
    for (int layer = first_; layer < end_; ++layer) {
      for (const Block* block : cost_.blocks_[layer])
        block->born == Kind::F ? add_activation(*block) : add_gradient(*block);
    }
    copy_between_devices();
    keep_inputs();
    for (int layer = first_; layer < end_; ++layer) {
      forward_.run(cost_.profile_.layers[layer].forward_extra, forward_.change(layer));
      stored_.run(cost_.profile_.layers[layer].stored_extra, stored_.change(layer));
    }
    for (int layer = end_; layer-- > first_;) run_backward(layer);
    const auto recompute = forward_.peak() - entering_ + buffers_;
    return {.forward = {forward_.peak(), forward_.held()},
            .stored = {stored_.peak(), stored_.held()},
            .recompute = {recompute, recompute_.held()},
            .backward = {backward_.peak(), backward_.held()},
            .input_gradient = {input_gradient_.peak(), (splits_ ? input_gradient_ : backward_).held()},
            .weight_gradient_extra = weight_gradient_.peak(),
            .first_backward_extra = first_backward_.peak(),
            .first_input_gradient_extra = first_input_gradient_.peak(),
            .first_weight_gradient_extra = first_weight_gradient_.peak(),
            .parameters = cost_.gradients(first_, end_),
            .early_parameters = early_parameters(),
            .splits = splits_};
  }

 private:
  bool inside(int layer) const { return layer >= first_ && layer < end_; }
  static Until until_of(const Block& block) { return block.until == Kind::W ? Until::kLast : Until::kSendsGradients; }

  /// Holds a block until another stage frees it, or none.
  void hold_outside(Pass& pass, const Block& block, Until until) const {
    const auto of_no_stage = block.freed_by == Block::kForwardsEnd ? Until::kForwardsEnd : Until::kNever;
    block.freed_by < 0 ? pass.hold(block.bytes, of_no_stage, 0)
                       : pass.hold(block.bytes, until, stage_of(block.freed_by, ends_));
  }

  /// A block that a backward allocates.
  void add_gradient(const Block& block) {
    auto& pass = block.born == Kind::B ? backward_ : input_gradient_;
    pass.change(block.layer) += block.bytes;
    if (!inside(block.freed_by)) {
      hold_outside(pass, block, until_of(block));
    } else if (block.until != Kind::W) {
      pass.change(block.freed_by) -= block.bytes;
    } else {
      input_gradient_.hold(block.bytes, Until::kLast, stage_);  // the engine holds a W's gradients until the W ends
    }
  }

  /// The stage from which this one gets a skip, as cut_edges() says.
  int sender_of(const SkipProfile& skip) const {
    int sender = stage_of(skip.from, ends_);
    bool is_own_worker = is_on_worker(sender);
    for (const int reader : skip.readers) {
      if (reader >= first_) break;
      const int stage = stage_of(reader, ends_);
      if (is_own_worker && !is_on_worker(stage)) continue;
      sender = stage;
      is_own_worker = is_on_worker(stage);
    }
    return sender;
  }
  bool is_on_worker(int stage) const {
    const auto& placement = options_.scheduling.placement;
    return placement.empty() ? stage == stage_ : placement[stage] == placement[stage_];
  }
  /// Whether what goes to or comes from a layer of another stage is copied.
  bool is_copied(int layer) const {
    return options_.copies && layer < cost_.layers_ && !is_on_worker(stage_of(layer, ends_));
  }
  /// Whether all cells of a stage are checkpointed and copy their inputs, as a layer changes one in place.
  bool copies_inputs(int stage) const {
    return options_.checkpoint.of(stage).recomputed(options_.chunks) == options_.chunks &&
           cost_.copies_inputs(ends_[stage - 1], ends_[stage]);
  }

  /// A block that a forward allocates.
  void add_activation(const Block& block) {
    const auto bytes = block.bytes;
    const auto until = until_of(block);
    const bool saved = block.until != Kind::F;
    forward_.change(block.layer) += bytes;
    if (!inside(block.freed_by)) {
      hold_outside(forward_, block, is_copied(block.freed_by) ? Until::kForward : saved ? until : Until::kRecompute);
    } else if (saved && until == Until::kLast && !inside(block.reaches) && block.reaches < cost_.layers_) {
      // Saved by both sides of a cut: here for the backward, there for a W. An R makes it for this side alone.
      const bool copied = is_copied(block.reaches);
      copied ? forward_.hold(bytes, Until::kSendsGradients, stage_)
             : forward_.hold(bytes, Until::kLast, stage_of(block.reaches, ends_), /*until_own_backward=*/true);
      recompute_.hold(bytes, Until::kSendsGradients, stage_);
      backward_.change(block.freed_by) -= bytes;
      if (!copied) shared_.change(block.freed_by) += bytes;
    } else if (saved) {
      forward_.hold(bytes, until, stage_);
      recompute_.hold(bytes, until, stage_);
      backward_.change(block.freed_by) -= bytes;
      (until == Until::kLast ? weight_gradient_ : input_gradient_).change(block.freed_by) -= bytes;
    } else {
      forward_.change(block.freed_by) -= bytes;
    }
    // Without a graph the block lives until its last use.
    const int last_use = block.readers.empty() ? block.reaches : std::max(block.reaches, block.readers.back());
    if (last_use == block.layer) return;
    stored_.change(block.layer) += bytes;
    if (inside(last_use)) {
      stored_.change(last_use) -= bytes;
    } else if (last_use == cost_.layers_) {
      stored_.hold(bytes, Until::kForwardsEnd, 0);
    } else {
      // Of several stages that get it, the first one's backward comes last. Their recomputes have no order.
      const int first_use = block.reaches >= end_ ? end_ : *std::ranges::lower_bound(block.readers, end_);
      const int receiver = stage_of(first_use, ends_);
      const bool copied = is_copied(first_use) || copies_inputs(receiver);
      const auto freed_in = saved ? until : last_use >= ends_[receiver] ? Until::kSendsGradients : Until::kRecompute;
      stored_.hold(bytes, copied ? Until::kForward : freed_in, receiver);
    }
  }

  std::int64_t copies_of(const std::vector<int>& layers) const {
    return std::ranges::count_if(layers, [&](int layer) { return is_copied(layer); });
  }

  void copy_between_devices() {
    const auto& profile = cost_.profile_;
    std::int64_t gradients = 0;  // an upper bound: as if each later layer on another worker were in a stage of its own
    if (first_ > 0 && is_copied(first_ - 1)) entering_ += profile.layers[first_ - 1].output;
    if (is_copied(end_)) gradients += profile.layers[end_ - 1].output;
    for (const auto& skip : profile.skips) {
      if (skip.from < first_ && is_read(skip, first_, end_) && options_.copies && !is_on_worker(sender_of(skip))) {
        entering_ += skip.bytes;
      }
      if (inside(skip.from)) gradients += skip.bytes * copies_of(skip.readers);
    }
    for (const auto& tie : profile.ties) {
      const auto next = std::ranges::lower_bound(tie.layers, first_);
      if (next != tie.layers.end() && *next < end_ && is_copied(tie.layers.front())) entering_ += tie.bytes;
      if (inside(tie.layers.front())) gradients += tie.bytes * copies_of(tie.layers);
    }
    for (auto* pass : {&forward_, &stored_}) {
      pass->hold(entering_, Until::kLast, stage_);
      pass->run(entering_, entering_);
    }
    for (auto* pass : {&backward_, &first_backward_, &input_gradient_, &first_input_gradient_})
      pass->run(gradients, gradients);
  }

  /// What a checkpointed cell copies: its small buffers, as large ones seldom change, and inputs that layers change.
  void keep_inputs() {
    for (int layer = first_; layer < end_; ++layer) {
      const auto bytes = cost_.profile_.layers[layer].buffers;
      if (bytes < kLargeBytes) buffers_ += bytes;
    }
    stored_.hold(buffers_, Until::kRecompute, stage_);
    stored_.run(buffers_, buffers_);
    recompute_.hold(buffers_, Until::kSendsGradients, stage_);
    if (first_ == 0 || !cost_.copies_inputs(first_, end_)) return;
    const auto activation = cost_.profile_.layers[first_ - 1].output;
    const auto inputs = cost_.bytes_in(first_, end_) - cost_.bytes_borrowed(first_, end_);
    stored_.hold(activation, Until::kLast, stage_);
    stored_.hold(inputs - activation, Until::kRecompute, stage_);
    stored_.run(inputs, inputs);
  }

  /// The gradients that an I computes.
  std::int64_t early_parameters() const {
    std::int64_t bytes = 0;
    for (int layer = first_; layer < end_; ++layer) {
      if (!splits_ || !cost_.has_w_[layer]) bytes += cost_.gradients(layer, layer + 1);
    }
    return bytes;
  }

  void run_backward(int layer) {
    const auto& of = cost_.profile_.layers[layer];
    std::int64_t kept_by_backward = 0;
    for (const Block* block : cost_.blocks_[layer]) kept_by_backward += block->born == Kind::B ? block->bytes : 0;
    const auto extra = of.backward_extra;
    const auto first_extra = std::max(extra, of.first_backward_extra);
    const auto change = backward_.change(layer) + of.late_gradients;
    const auto large = of.gradients - of.late_gradients;
    backward_.run(extra, change);
    first_backward_.run(first_extra, change + large);
    if (splits_) {
      const auto change_in_i = input_gradient_.change(layer) + (cost_.has_w_[layer] ? 0 : of.late_gradients);
      input_gradient_.run(of.input_gradient_extra, change_in_i);
      first_input_gradient_.run(of.input_gradient_extra, change_in_i + (cost_.has_w_[layer] ? 0 : large));
    } else {  // a whole backward, while the later stage's W has yet to come
      const auto shared = shared_.change(layer);
      input_gradient_.run(extra + shared, change + shared);
      first_input_gradient_.run(first_extra + shared, change + large + shared);
    }
    // A W takes what a whole backward takes above the gradients that it passes on.
    const auto extra_of_w = std::max(large, extra - kept_by_backward);
    const auto change_in_w = weight_gradient_.change(layer) + (cost_.has_w_[layer] ? of.late_gradients : 0);
    weight_gradient_.run(extra_of_w, change_in_w);
    first_weight_gradient_.run(std::max(large, first_extra - kept_by_backward), change_in_w + large);
  }

  const StageCost& cost_;
  const int first_;
  const int end_;
  const std::vector<int>& ends_;
  const RunOptions& options_;  // without a placement, each stage has a worker
  const int stage_;
  const bool splits_ = cost_.splits(first_);
  std::int64_t buffers_ = 0;
  std::int64_t entering_ = 0;  ///< bytes of the inputs that are copied
  Pass forward_{first_, end_};
  Pass stored_{first_, end_};    // a forward without graph
  Pass backward_{first_, end_};  // whole; or in two parts:
  Pass input_gradient_{first_, end_};
  Pass weight_gradient_{first_, end_};
  Pass shared_{first_, end_};  // bytes that a layer saves for its backward, and a later stage for a W
  // Without changes by layer:
  Pass recompute_{first_, first_};
  Pass first_backward_{first_, first_};
  Pass first_input_gradient_{first_, first_};
  Pass first_weight_gradient_{first_, first_};
};

bool StageCost::copies_inputs(int first, int end) const {
  if (profile_.layers[first].changes_input) return true;
  return std::any_of(profile_.skips.begin(), profile_.skips.end(),
                     [&](const auto& skip) { return skip.changed && skip.from < first && is_read(skip, first, end); });
}

CellBytes StageCost::cell_bytes(int first, int end, const std::vector<int>& ends, const RunOptions& options) const {
  return Cell(*this, first, end, ends, options).bytes();
}

}  // namespace gpipe
