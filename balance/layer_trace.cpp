#include "balance/layer_trace.h"

#include <atomic>

#include "balance/trial.h"
#include "gpipe/autograd/boundary.h"
#include "gpipe/base/clock.h"
#include "gpipe/tensors/torch_internals.h"

namespace gpipe {

namespace {

std::uint64_t new_id() {
  static std::atomic<std::uint64_t> last = 0;
  return ++last;
}

/// The part that a thread runs, and the id of its trace. May outlive the trace.
struct Running {
  std::uint64_t trace = 0;
  LayerTrace::Part part;
};
thread_local Running running;

/// Identity node behind an output of a layer, stashed or not: its part of the backward begins at the first of them.
struct PartBegins : torch::autograd::Node {
  PartBegins(std::shared_ptr<LayerTrace> trace, const LayerTrace::Part& forward)
      : trace(std::move(trace)), part{Kind::B, false, forward.layer, forward.micro_batch} {}

  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    trace->begins(part);
    trace->passes_back(part.layer, gradients);
    return std::move(gradients);
  }
  std::string name() const override { return "GPipePartBegins"; }

  const std::shared_ptr<LayerTrace> trace;
  const LayerTrace::Part part;
};

/// Reports the skips that a layer reads, and the gradients of the skips that it stashes.
class SkipReporter : public SkipContext {
 public:
  SkipReporter(std::shared_ptr<LayerTrace> trace, const LayerTrace::Part& part)
      : outer_(SkipContext::current()), trace_(std::move(trace)), part_(part) {}

  void stash(const SkipKey& key, at::Tensor tensor) override {
    if (part_.graph) tensor = append_node(Value(tensor), make_node<PartBegins>(trace_, part_)).tensors().front();
    outer_.stash(key, std::move(tensor));
  }
  at::Tensor pop(const SkipKey& key) override { return report(key, outer_.pop(key)); }
  at::Tensor peek(const SkipKey& key) override { return report(key, outer_.peek(key)); }

 private:
  at::Tensor report(const SkipKey& key, at::Tensor tensor) {
    trace_->reads(part_.layer, part_.micro_batch, key, tensor);
    return tensor;
  }

  SkipContext& outer_;
  const std::shared_ptr<LayerTrace> trace_;
  const LayerTrace::Part part_;
};

bool in_weights(double time, const Timeline& timeline) {
  return std::any_of(timeline.spans.begin(), timeline.spans.end(), [&](const Span& span) {
    return span.action.kind == Kind::W && span.start <= time && time <= span.end;
  });
}

/// The bytes of blocks that differ in nothing else.
using BytesOfBlocks = std::map<Block, std::int64_t>;

void append(std::vector<Block>& blocks, const BytesOfBlocks& bytes) {
  for (const auto& [block, size] : bytes) {
    if (size > 0) blocks.emplace_back(block).bytes = size;
  }
}

// The end of the action that a time is in.
double end_of_action(double time, const Timeline& timeline) {
  for (const Span& span : timeline.spans) {
    if (span.start <= time && time <= span.end) return span.end;
  }
  return time;
}

}  // namespace

std::int64_t bytes_of(const at::Tensor& tensor) {
  return tensor.defined() && tensor.layout() == at::kStrided ? static_cast<std::int64_t>(tensor.nbytes()) : 0;
}

LayerTrace::LayerTrace(int layers, bool recomputes, c10::Device device)
    : id_(new_id()), recomputes_(recomputes), device_(device), output_bytes_(layers) {}

std::vector<std::unique_ptr<Layer>> LayerTrace::wrap(std::vector<std::unique_ptr<Layer>> layers) {
  const int count = static_cast<int>(layers.size());
  for (int i = 0; i < count; ++i) {
    const auto forward = [trace = shared_from_this(), i, count, forwards = 0](Layer& layer, Value input) mutable {
      const bool recompute = is_recomputing();
      const bool graph = at::GradMode::is_enabled() && !is_checkpointing();
      const Part part{recompute ? Kind::R : Kind::F, graph, i, recompute ? 0 : forwards++};
      trace->begins(part);
      if (!recompute) trace->reaches(i, part.micro_batch, input.tensors());
      SkipReporter context(trace, part);
      SkipContextGuard guard(context);
      auto output = layer.forward(std::move(input));
      if (i + 1 == count && !recompute) trace->reaches(count, part.micro_batch, output.tensors());
      return graph ? append_node(output, make_node<PartBegins>(trace, part)) : output;
    };
    layers[i] = decorate(std::move(layers[i]), forward);
  }
  return layers;
}

std::vector<LayerTrace::Mark> LayerTrace::take_marks() {
  MutexLock lock(mutex_);
  return std::exchange(marks_, {});
}

void LayerTrace::begins(const Part& part) {
  // A backward comes once for each output of its layer.
  if (const Part* present = part_of_this_thread(); part.kind == Kind::B && present && *present == part) return;
  // Wait for the device, so that the times are those of the work and not of its launch.
  if (!device_.is_cpu()) c10::impl::VirtualGuardImpl(device_.type()).getStream(device_).synchronize();
  running = {id_, part};
  MutexLock lock(mutex_);
  marks_.push_back({part, now()});
}

LayerTrace::Allocation* LayerTrace::find(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage()) return nullptr;
  const auto found = live_.find(tensor.storage().data());
  return found == live_.end() ? nullptr : &allocations_[found->second];
}

void LayerTrace::reaches(int layer, int micro_batch, const std::vector<at::Tensor>& activation) {
  MutexLock lock(mutex_);
  if (micro_batch != 0) return;
  std::int64_t bytes = 0;
  for (const auto& tensor : activation) {
    if (!tensor.defined()) continue;
    bytes += bytes_of(tensor);
    if (auto* allocation = find(tensor)) allocation->reaches = std::max(allocation->reaches, layer);
    inputs_.emplace_back(layer, tensor);
  }
  if (layer > 0) output_bytes_[layer - 1] = bytes;
}

void LayerTrace::reads(int layer, int micro_batch, const SkipKey& key, const at::Tensor& skip) {
  MutexLock lock(mutex_);
  if (micro_batch != 0) return;
  skips_[key] = {bytes_of(skip), VersionWatch(skip), skip.defined() && skip.requires_grad()};
  if (auto* allocation = find(skip)) allocation->readers.insert(layer);
}

void LayerTrace::passes_back(int layer, const std::vector<at::Tensor>& gradients) {
  MutexLock lock(mutex_);
  for (const auto& gradient : gradients) {
    if (auto* allocation = find(gradient)) allocation->passes_back_to = layer;
  }
}

void LayerTrace::read_skips(Profile& profile, const std::vector<SkipLink>& links) {
  MutexLock lock(mutex_);
  for (const auto& link : links) {
    const auto& [bytes, version, wants_gradient] = skips_[link.key];
    profile.skips.push_back(
        {link.key.name, link.from, distinct_readers(link), bytes, version.changed(), wants_gradient});
  }
}

const LayerTrace::Part* LayerTrace::part_of_this_thread() const {
  return running.trace == id_ ? &running.part : nullptr;
}

void LayerTrace::allocated(const void* data, std::int64_t bytes) {
  const Part* part = part_of_this_thread();
  if (part == nullptr) return;
  MutexLock lock(mutex_);
  live_[data] = allocations_.size();
  allocations_.push_back(
      {.born = *part, .bytes = bytes, .reaches = part->layer, .born_at = now(), .passes_back_to = part->layer});
}

void LayerTrace::freed(const void* data, std::int64_t) {
  const Part* part = part_of_this_thread();
  MutexLock lock(mutex_);
  const auto found = live_.extract(data);
  if (!found) return;
  auto& allocation = allocations_[found.mapped()];
  if (part != nullptr) allocation.freed_by = *part;
  allocation.freed_at = now();
}

std::vector<LayerTrace::Saved> LayerTrace::saved_for_weights(const Timeline& timeline) const {
  MutexLock lock(mutex_);
  std::vector<Saved> saved;
  for (const auto& allocation : allocations_) {
    if (allocation.born.kind != Kind::F || allocation.born.micro_batch != 0) continue;
    saved.push_back({allocation.bytes, in_weights(allocation.freed_at, timeline)});
  }
  return saved;
}

std::int64_t LayerTrace::peak_between(double start, double end, bool as_last) const {
  std::vector<std::pair<double, std::int64_t>> changes;
  std::int64_t before = 0;
  const auto add = [&](double time, std::int64_t bytes) {
    if (time < start) before += bytes;
    if (time >= start && time < end) changes.emplace_back(time, bytes);
  };
  for (const auto& allocation : allocations_) {
    add(allocation.born_at, allocation.bytes);
    const bool arrives = allocation.born.kind == Kind::B && allocation.born_at < start && allocation.freed_at >= start;
    if (as_last && arrives) continue;
    add(allocation.freed_at, -allocation.bytes);
  }
  std::stable_sort(changes.begin(), changes.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  auto now = before;
  auto peak = before;
  for (const auto& [time, bytes] : changes) peak = std::max(peak, now += bytes);
  return peak - before;
}

// The part of a thread that runs a W is still the last one of an I.
void LayerTrace::read_split_memory(Profile& profile, const Timeline& timeline) {
  MutexLock lock(mutex_);
  BytesOfBlocks bytes;
  const auto block = [](int layer, Kind until, int freed_by) {
    return Block{.born = Kind::I, .layer = layer, .until = until, .freed_by = freed_by, .reaches = layer};
  };
  for (const auto& allocation : allocations_) {
    const auto& born = allocation.born;
    const auto& freed_by = allocation.freed_by;
    if (born.kind != Kind::B || born.micro_batch != 0 || in_weights(allocation.born_at, timeline)) continue;
    if (freed_by && in_weights(allocation.freed_at, timeline)) {
      bytes[block(born.layer, Kind::W, allocation.passes_back_to)] += allocation.bytes;
    } else if (freed_by && freed_by->micro_batch == 0) {
      if (*freed_by != born) bytes[block(born.layer, Kind::B, freed_by->layer)] += allocation.bytes;
    } else {
      bytes[block(born.layer, Kind::B, Block::kNever)] += allocation.bytes;
    }
  }
  append(profile.blocks, bytes);
  read_peaks(profile, &timeline);
}

void LayerTrace::read_peaks(Profile& profile, const Timeline* split) const {
  for (std::size_t i = 0; i < marks_.size(); ++i) {
    const Part& part = marks_[i].part;
    const double start = marks_[i].start;
    if (part.micro_batch != 0 || (split != nullptr && part.kind != Kind::B)) continue;
    auto end = split != nullptr ? end_of_action(start, *split) : std::numeric_limits<double>::infinity();
    if (i + 1 < marks_.size()) end = std::min(end, marks_[i + 1].start);
    auto& layer = profile.layers[part.layer];
    const auto peak = peak_between(start, end, /*as_last=*/false);
    if (part.kind == Kind::F) {
      auto& extra = recomputes_ ? layer.stored_extra : layer.forward_extra;
      extra = std::max(extra, peak);
    } else if (part.kind == Kind::B && !recomputes_) {
      auto& extra = split != nullptr ? layer.input_gradient_extra : layer.backward_extra;
      auto& last_extra = split != nullptr ? layer.last_input_gradient_extra : layer.last_backward_extra;
      extra = std::max(extra, peak);
      last_extra = std::max(last_extra, peak_between(start, end, /*as_last=*/true));
    }
  }
}

void LayerTrace::read_memory(Profile& profile, const std::vector<Saved>& saved) {
  MutexLock lock(mutex_);
  read_peaks(profile, nullptr);
  if (recomputes_) return;
  for (std::size_t i = 0; i < profile.layers.size(); ++i) profile.layers[i].output = output_bytes_[i];
  for (const auto& [layer, version] : inputs_) {
    if (layer < static_cast<int>(profile.layers.size())) profile.layers[layer].changes_input |= version.changed();
  }
  BytesOfBlocks bytes;
  auto in_split = saved.begin();  // the forwards allocate the same if backwards are split
  for (const auto& allocation : allocations_) {
    const auto& born = allocation.born;
    const auto size = allocation.bytes;
    const auto& freed_by = allocation.freed_by;
    if (born.micro_batch != 0) continue;
    bool kept = false;
    if (born.kind == Kind::F && in_split != saved.end()) {
      kept = in_split->kept && in_split->bytes == size;
      in_split = in_split->bytes == size ? in_split + 1 : saved.end();
    }
    if (freed_by == born) continue;
    const bool by_part = freed_by && freed_by->micro_batch == 0;
    const int caller = born.kind == Kind::F ? Block::kForwardsEnd : Block::kNever;
    const auto until = !by_part ? Kind::F : kept && freed_by->kind == Kind::B ? Kind::W : freed_by->kind;
    const int freeing_layer = by_part ? freed_by->layer : caller;
    std::vector<int> readers(allocation.readers.begin(), allocation.readers.end());
    bytes[{0, born.kind, born.layer, until, freeing_layer, allocation.reaches, std::move(readers)}] += size;
    if (born.kind == Kind::F && by_part && freed_by->kind == Kind::B) profile.layers[born.layer].saved += size;
  }
  // Gradients of small parameters are added up in the last part of the backward. They are counted as late_gradients.
  auto lowest = static_cast<int>(profile.layers.size());
  for (const auto& [part, start] : marks_) lowest = part.kind == Kind::B ? std::min(lowest, part.layer) : lowest;
  for (int i = 0; i < static_cast<int>(profile.layers.size()); ++i) {
    const auto late = bytes.find({0, Kind::B, i, Kind::B, lowest, i});
    if (late != bytes.end()) late->second -= std::min(late->second, profile.layers[i].late_gradients);
  }
  append(profile.blocks, bytes);
}

}  // namespace gpipe
