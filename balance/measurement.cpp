#include "balance/measurement.h"

#include <ATen/Functions.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <exception>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_format.h"
#include "balance/cut.h"
#include "balance/layer_trace.h"
#include "balance/stage_cost.h"
#include "balance/trial.h"
#include "gpipe/gpipe.h"
#include "gpipe/micro_batch.h"

namespace gpipe {
namespace {

using absl::StrFormat;

constexpr int kKinds = 4;
enum : int { kForward, kStored, kRecompute, kBackward };

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

/// A pipeline whose layers are watched.
struct Watched {
  std::shared_ptr<LayerTrace> trace;
  GPipe pipe{nullptr};
};

/// Seconds, by layer and kind.
using Times = std::vector<std::array<std::vector<double>, kKinds>>;

int kind_of(const LayerTrace::Part& part) {
  if (part.kind == Kind::F) return part.graph ? kForward : kStored;
  return part.kind == Kind::R ? kRecompute : kBackward;
}

/// Adds the duration of each layer's part. The spans are one stage's actions of one kind; the marks are that stage's.
/// Both are in order of time.
void add(Times& times, const std::vector<const Span*>& spans, const std::vector<LayerTrace::Mark>& marks) {
  for (const Span* span : spans) {
    const auto starts_before = [](const LayerTrace::Mark& mark, double time) { return mark.start < time; };
    const auto first = std::lower_bound(marks.begin(), marks.end(), span->start, starts_before);
    const auto last = std::lower_bound(first, marks.end(), span->end, starts_before);
    for (auto mark = first; mark != last; ++mark) {
      const double start = mark == first ? span->start : mark->start;
      const double end = mark + 1 == last ? span->end : (mark + 1)->start;
      times[mark->part.layer][kind_of(mark->part)].push_back(end - start);
    }
  }
}

/// Uses only the spans that overlapped other stages' work most, as in a full pipeline.
void add(Times& times, const Timeline& timeline, const std::vector<LayerTrace::Mark>& marks,
         const std::vector<std::int64_t>& balance) {
  std::vector<int> stage_of;
  for (const auto layers : balance) {
    stage_of.insert(stage_of.end(), layers, stage_of.empty() ? 0 : stage_of.back() + 1);
  }
  std::vector<std::vector<LayerTrace::Mark>> of_stage(balance.size());
  for (const auto& mark : marks) of_stage[stage_of[mark.part.layer]].push_back(mark);
  for (const auto& [action, spans] : most_overlapped(timeline)) add(times, spans, of_stage[action.first]);
}

class Measurement {
 public:
  Measurement(const Model::MakeLayers& make, const Value& sample, const ProfileOptions& options)
      : make_(make), options_(options), samples_(batch_size(sample)), device_(sample.tensors().front().device()) {
    for (const auto& layer : make_()) named_.push_back({layer->name(), layer->module()});
    layers_ = static_cast<int>(named_.size());
    workers_ = std::min(options.workers(), layers_);
    batch_ = batch(std::max(2, workers_), sample);
    batch_of_three_ = batch(3, sample);
  }

  Profile run() {
    auto profile = describe();
    measure_times(profile);
    for (const bool recomputes : {false, true}) read_memory(profile, recomputes);
    report(1);
    return profile;
  }

 private:
  static Value batch(int micro_batches, const Value& sample) {
    std::vector<at::Tensor> tensors;
    for (const auto& tensor : sample.tensors()) {
      tensors.push_back(at::cat(std::vector<at::Tensor>(micro_batches, tensor.detach())));
      tensors.back().set_requires_grad(tensor.requires_grad());
    }
    return Value(sample.form(), std::move(tensors));
  }

  /// The fields of a profile that need no run: sizes of parameters and buffers.
  Profile describe() const {
    Profile profile{.samples = samples_,
                    .device = device_.str(),
                    .workers = workers_,
                    .intraop_threads = options_.intraop_threads()};
    absl::flat_hash_map<const void*, int> owners;
    for (int i = 0; i < layers_; ++i) {
      auto& layer = profile.layers.emplace_back();
      layer.name = named_[i].name;
      layer.shares_with = i;
      // A shared tensor is counted in the first layer that has it.
      const auto add = [&](const at::Tensor& tensor, std::int64_t& sum) {
        const auto [owner, is_new] = owners.try_emplace(tensor.unsafeGetTensorImpl(), i);
        layer.shares_with = std::min(layer.shares_with, owner->second);
        const auto bytes = is_new ? bytes_of(tensor) : 0;
        sum += bytes;
        if (!tensor.requires_grad()) return;
        layer.gradients += bytes;
        if (!is_large(tensor)) layer.late_gradients += bytes;
      };
      for (const auto& parameter : named_[i].module->parameters()) add(parameter, layer.parameters);
      for (const auto& buffer : named_[i].module->buffers()) add(buffer, layer.buffers);
      layer.optimizer = static_cast<std::int64_t>((options_.param_scale() - 2) * static_cast<double>(layer.gradients));
    }
    return profile;
  }

  Watched watch(const std::vector<std::int64_t>& balance, bool recomputes) const {
    Watched watched{std::make_shared<LayerTrace>(layers_, recomputes, device_)};
    watched.pipe = GPipe(watched.trace->watch(make_()), balance,
                         GPipeOptions()
                             .devices(std::vector<torch::Device>(balance.size(), device_))
                             .split_size(samples_)
                             .checkpoint(recomputes ? Checkpoint::kAlways : Checkpoint::kNever)
                             .intraop_threads(options_.intraop_threads()));
    watched.pipe->train();
    return watched;
  }

  void step(Watched& watched, const Value& batch) const {
    try {
      trial_step(watched.pipe, batch);
    } catch (const c10::OutOfMemoryError&) {
      throw;  // profile() retries layer by layer
    } catch (...) {
      rethrow(watched);
    }
  }

  [[noreturn]] void rethrow(Watched& watched) const {
    const auto failed = watched.pipe->last_error();
    if (!failed) throw;
    const bool backward = failed->action.kind != Kind::F;
    const int layer = failed->layer >= 0 ? failed->layer : last_backward(watched, failed->action.stage);
    const auto name = layer < 0 ? "a layer" : StrFormat("layer '%s'", named_[layer].name);
    std::string message = failed->message;
    try {
      throw;
    } catch (const c10::Error& error) {
      message = error.what_without_backtrace();
    } catch (...) {
    }
    std::throw_with_nested(std::runtime_error(
        StrFormat("[profile] %s failed in its %s: %s", name, backward ? "backward" : "forward", message)));
  }

  /// The layer of a stage whose part of the backward began last; -1 for none.
  static int last_backward(Watched& watched, int stage) {
    const auto& balance = watched.pipe->balance();
    const auto first = std::accumulate(balance.begin(), balance.begin() + stage, std::int64_t{0});
    int layer = -1;
    for (const auto& [part, start] : watched.trace->take_marks()) {
      if (part.kind == Kind::B && part.layer >= first && part.layer < first + balance[stage]) layer = part.layer;
    }
    return layer;
  }

  void measure_times(Profile& profile) {
    const auto start = Clock::now();
    std::vector<std::int64_t> balance = {layers_};
    if (workers_ > 1) {
      for (auto& layer : profile.layers) layer.forward = 1;  // any equal cost, for a first cut
      fill_in(profile, run_steps(cut(profile), 1, start, 0));
      balance = cut(profile);
    }
    fill_in(profile, run_steps(balance, options_.repeats(), start, 0.3));
  }

  /// Cuts into one stage per worker, or fewer if layers that share a parameter would be separated.
  std::vector<std::int64_t> cut(const Profile& profile) {
    const StageCost stage(profile);
    int parts = 1;
    for (int layer = 1; layer < layers_; ++layer) parts += stage.can_cut_before(layer) ? 1 : 0;
    return balance_by_time(profile, std::min(workers_, parts), {.checkpoint = Checkpoint::kNever});
  }

  Times run_steps(const std::vector<std::int64_t>& balance, int repeats, Clock::time_point start, double done) {
    std::array<Watched, 2> modes = {watch(balance, false), watch(balance, true)};
    std::array<std::shared_ptr<Timeline>, 2> timelines;
    for (std::size_t i = 0; i < modes.size(); ++i) {
      step(modes[i], batch_);
      modes[i].trace->take_marks();
      timelines[i] = std::make_shared<Timeline>();
      modes[i].pipe->trace(timelines[i]);
    }
    for (int repeat = 0; repeat < repeats; ++repeat) {
      const double used = std::min(1.0, seconds_since(start) / options_.seconds());
      if (repeat > 0 && used >= 1) break;
      report(done + (0.9 - done) * std::max(1.0 * repeat / options_.repeats(), used));
      for (auto& mode : modes) step(mode, batch_);
    }
    Times times(layers_);
    for (std::size_t i = 0; i < modes.size(); ++i) add(times, *timelines[i], modes[i].trace->take_marks(), balance);
    return times;
  }

  void read_memory(Profile& profile, bool recomputes) const {
    auto watched = watch({layers_}, recomputes);
    {
      const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, watched.trace);
      step(watched, batch_of_three_);
    }
    watched.trace->read_memory(profile);
    if (recomputes) return;
    auto skips = watched.trace->skips();
    for (const auto& link : skip_links(named_)) {
      const auto& [bytes, changed] = skips[link.key];
      profile.skips.push_back({link.key.name, link.from, link.to, bytes, changed});
    }
  }

  void fill_in(Profile& profile, const Times& times) const {
    for (int i = 0; i < layers_; ++i) {
      auto& layer = profile.layers[i];
      layer.forward = median(times[i][kForward]);
      layer.stored = median(times[i][kStored]);
      layer.recompute = median(times[i][kRecompute]);
      layer.backward = median(times[i][kBackward]);
    }
  }

  void report(double done) const {
    if (options_.progress()) options_.progress()(done);
  }

  const Model::MakeLayers& make_;
  const ProfileOptions& options_;
  const std::int64_t samples_;
  const torch::Device device_;
  std::vector<NamedLayer> named_;
  int layers_ = 0;
  int workers_ = 1;
  Value batch_;
  Value batch_of_three_;  ///< the last backward, micro-batch 0's, no longer allocates gradient sums
};

}  // namespace

Profile measure(const Model::MakeLayers& layers, const Value& sample, const ProfileOptions& options) {
  return Measurement(layers, sample, options).run();
}

}  // namespace gpipe
