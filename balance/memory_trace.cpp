#include "balance/memory_trace.h"

#include <algorithm>
#include <limits>

#include "balance/trial.h"
#include "gpipe/base/clock.h"

namespace gpipe {
namespace {

/// Reports the skips that a layer reads.
class SkipReporter : public SkipContext {
 public:
  SkipReporter(MemoryTrace& trace, int layer) : outer_(SkipContext::current()), trace_(trace), layer_(layer) {}

  void stash(const SkipKey& key, at::Tensor tensor) override { outer_.stash(key, std::move(tensor)); }
  at::Tensor pop(const SkipKey& key) override { return report(key, outer_.pop(key)); }
  at::Tensor peek(const SkipKey& key) override { return report(key, outer_.peek(key)); }

 private:
  at::Tensor report(const SkipKey& key, at::Tensor tensor) {
    trace_.reads(layer_, key, tensor);
    return tensor;
  }

  SkipContext& outer_;
  MemoryTrace& trace_;
  const int layer_;
};

/// The action that a time belongs to: it runs then, or ran last. None before the first action, and for memory that is
/// never freed.
std::optional<Action> action_at(const MemoryTrace::Step& step, double time) {
  const auto next = std::ranges::upper_bound(step.spans, time, {}, &Span::launched);
  if (next == step.spans.begin() || time == std::numeric_limits<double>::infinity()) return std::nullopt;
  return (next - 1)->action;
}

bool is_of(const std::optional<Action>& action, int micro_batch) {
  return action && action->micro_batch == micro_batch;
}

/// The bytes of blocks that differ in nothing else.
using BytesOfBlocks = std::map<Block, std::int64_t>;

void append(std::vector<Block>& blocks, const BytesOfBlocks& bytes) {
  for (const auto& [block, size] : bytes) blocks.emplace_back(block).bytes = size;
}

}  // namespace

std::int64_t bytes_of(const at::Tensor& tensor) {
  return tensor.defined() && tensor.layout() == at::kStrided ? static_cast<std::int64_t>(tensor.nbytes()) : 0;
}

std::vector<std::unique_ptr<Layer>> MemoryTrace::wrap(std::vector<std::unique_ptr<Layer>> layers) {
  for (int i = 0; i < std::ssize(layers); ++i) {
    const auto forward = [trace = shared_from_this(), i, is_first = true](Layer& layer, Value input) mutable {
      if (!std::exchange(is_first, false)) return layer.forward(std::move(input));
      trace->gets_input(i, input.tensors());
      SkipReporter context(*trace, i);
      const SkipContextGuard guard(context);
      return layer.forward(std::move(input));
    };
    layers[i] = decorate(std::move(layers[i]), forward);
  }
  return layers;
}

MemoryTrace::Allocation* MemoryTrace::find(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage()) return nullptr;
  const auto found = live_.find(tensor.storage().data());
  return found == live_.end() ? nullptr : &allocations_[found->second];
}

void MemoryTrace::gets_input(int layer, const std::vector<at::Tensor>& input) {
  MutexLock lock(mutex_);
  auto& noted = inputs_.emplace_back(Input{layer});
  for (const auto& tensor : input) {
    if (!tensor.defined()) continue;
    noted.bytes += bytes_of(tensor);
    noted.versions.emplace_back(tensor);
    if (auto* allocation = find(tensor)) allocation->reaches = std::max(allocation->reaches, layer);
  }
}

void MemoryTrace::reads(int layer, const SkipKey& key, const at::Tensor& skip) {
  MutexLock lock(mutex_);
  skips_[key] = {bytes_of(skip), VersionWatch(skip), skip.defined() && skip.requires_grad()};
  if (auto* allocation = find(skip)) allocation->readers.insert(layer);
}

void MemoryTrace::allocated(const void* data, std::int64_t bytes) {
  if (std::this_thread::get_id() == caller_) return;
  MutexLock lock(mutex_);
  live_[data] = allocations_.size();
  allocations_.push_back({.bytes = bytes, .born = now()});
}

void MemoryTrace::freed(const void* data, std::int64_t) {
  MutexLock lock(mutex_);
  const auto found = live_.extract(data);
  if (found && std::this_thread::get_id() != caller_) allocations_[found.mapped()].freed = now();
}

std::int64_t MemoryTrace::peak(const Step& step, std::size_t span) const {
  const double start = step.spans[span].launched;
  const bool is_last = span + 1 == step.spans.size();
  const double end = is_last ? std::numeric_limits<double>::infinity() : step.spans[span + 1].launched;
  std::vector<std::pair<double, std::int64_t>> changes;
  const auto add = [&](double time, std::int64_t bytes) {
    if (time >= start && time < end) changes.emplace_back(time, bytes);
  };
  for (const auto& allocation : allocations_) {
    add(allocation.born, allocation.bytes);
    add(allocation.freed, -allocation.bytes);
  }
  std::ranges::stable_sort(changes, {}, &std::pair<double, std::int64_t>::first);
  std::int64_t now = 0;
  std::int64_t peak = 0;
  for (const auto& [time, bytes] : changes) peak = std::max(peak, now += bytes);
  return peak;
}

void MemoryTrace::read_peaks(Profile& profile, const Step& step, const Action& like,
                             std::int64_t LayerProfile::*field) const {
  for (std::size_t i = 0; i < step.spans.size(); ++i) {
    const auto& action = step.spans[i].action;
    if (action.kind != like.kind || action.micro_batch != like.micro_batch || !step.is_of_model(action)) continue;
    auto& extra = profile.layers[step.layer_of(action)].*field;
    extra = std::max(extra, peak(step, i));
  }
}

std::vector<MemoryTrace::Saved> MemoryTrace::saved_for_weights(const Step& step) const {
  MutexLock lock(mutex_);
  std::vector<Saved> saved;
  for (const auto& allocation : allocations_) {
    const auto born = action_at(step, allocation.born);
    if (!is_of(born, 0) || born->kind != Kind::F) continue;
    const auto freed = action_at(step, allocation.freed);
    saved.push_back({allocation.bytes, freed && freed->kind == Kind::W});
  }
  return saved;
}

void MemoryTrace::read_whole(Profile& profile, const Step& step, const std::vector<Saved>& saved) const {
  MutexLock lock(mutex_);
  const int layers = static_cast<int>(profile.layers.size());
  read_peaks(profile, step, {Kind::F}, &LayerProfile::forward_extra);
  read_peaks(profile, step, {Kind::B}, &LayerProfile::backward_extra);
  int last = 0;  // the last micro-batch, whose backward comes first
  for (const auto& span : step.spans) last = std::max(last, span.action.micro_batch);
  read_peaks(profile, step, {Kind::B, 0, last}, &LayerProfile::first_backward_extra);
  for (const auto& [layer, bytes, versions] : inputs_) {
    if (layer > 0 && layer <= layers) profile.layers[layer - 1].output = bytes;
    if (layer < layers) profile.layers[layer].changes_input = std::ranges::any_of(versions, &VersionWatch::changed);
  }
  BytesOfBlocks bytes;
  auto in_split = saved.begin();  // the forwards allocate the same if backwards are split
  for (const auto& allocation : allocations_) {
    const auto born = action_at(step, allocation.born);
    if (!is_of(born, 0) || !step.is_of_model(*born)) continue;
    bool kept = false;
    if (born->kind == Kind::F && in_split != saved.end()) {
      kept = in_split->kept && in_split->bytes == allocation.bytes;
      in_split = in_split->bytes == allocation.bytes ? in_split + 1 : saved.end();
    }
    const auto freed = action_at(step, allocation.freed);
    if (freed == born) continue;
    Block block{.born = born->kind, .layer = step.layer_of(*born), .until = Kind::F};
    block.freed_by = born->kind == Kind::F ? Block::kForwardsEnd : Block::kNever;
    if (is_of(freed, 0)) {
      block.freed_by = step.layer_of(*freed);
      block.until = kept && freed->kind == Kind::B ? Kind::W : freed->kind;
    }
    block.reaches = std::clamp(allocation.reaches, block.layer, layers);
    block.readers.assign(allocation.readers.begin(), allocation.readers.end());
    bytes[block] += allocation.bytes;
    if (born->kind == Kind::F && is_of(freed, 0) && freed->kind == Kind::B) {
      profile.layers[block.layer].saved += allocation.bytes;
    }
  }
  append(profile.blocks, bytes);
}

void MemoryTrace::read_stored(Profile& profile, const Step& step) const {
  MutexLock lock(mutex_);
  read_peaks(profile, step, {Kind::F}, &LayerProfile::stored_extra);
}

void MemoryTrace::read_split(Profile& profile, const Step& step) const {
  MutexLock lock(mutex_);
  read_peaks(profile, step, {Kind::I}, &LayerProfile::input_gradient_extra);
  BytesOfBlocks bytes;
  for (const auto& allocation : allocations_) {
    const auto born = action_at(step, allocation.born);
    if (!is_of(born, 0) || (born->kind != Kind::I && born->kind != Kind::B)) continue;
    const auto freed = action_at(step, allocation.freed);
    if (freed == born || !step.is_of_model(*born)) continue;
    const int layer = step.layer_of(*born);
    Block block{.born = Kind::I, .layer = layer, .until = Kind::B, .freed_by = Block::kNever, .reaches = layer};
    if (is_of(freed, 0)) {
      block.until = freed->kind == Kind::W ? Kind::W : Kind::B;
      block.freed_by = step.layer_of(*freed);
    }
    bytes[block] += allocation.bytes;
  }
  append(profile.blocks, bytes);
}

void MemoryTrace::read_skips(Profile& profile, const std::vector<SkipLink>& links) const {
  MutexLock lock(mutex_);
  for (const auto& link : links) {
    const auto found = skips_.find(link.key);
    const auto [bytes, version, wants_gradient] = found == skips_.end() ? Skip() : found->second;
    profile.skips.push_back(
        {link.key.name, link.from, distinct_readers(link), bytes, version.changed(), wants_gradient});
  }
}

}  // namespace gpipe
