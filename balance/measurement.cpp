#include "balance/measurement.h"

#include <numeric>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_format.h"
#include "balance/cut.h"
#include "balance/layer_trace.h"
#include "balance/stage_cost.h"
#include "balance/trial.h"
#include "gpipe/autograd/stage.h"
#include "gpipe/base/clock.h"
#include "gpipe/run/step_input.h"

namespace gpipe {
namespace {

/// How the pipelines that are measured run: with whole backwards, with recomputes, or with split backwards.
enum class Mode { kWhole, kRecomputes, kSplits };

/// A pipeline, and the trace that wraps its layers.
struct TracedPipe {
  Mode mode = Mode::kWhole;
  std::shared_ptr<LayerTrace> trace;
  GPipe pipe{nullptr};
  std::shared_ptr<Timeline> timeline = std::make_shared<Timeline>();  ///< of the steps that the pipeline traces
};

enum : std::size_t { kForward, kStored, kRecompute, kBackward, kInputGradient };

/// The times that the marks of a trace tell, in that order.
constexpr std::array kTimes = {&LayerProfile::forward, &LayerProfile::stored, &LayerProfile::recompute,
                               &LayerProfile::backward, &LayerProfile::input_gradient};

/// Seconds, by layer and index in kTimes.
using Times = std::vector<std::array<std::vector<double>, kTimes.size()>>;

std::size_t index_of(const LayerTrace::Part& part, Kind action) {
  if (part.kind == Kind::F) return part.graph ? kForward : kStored;
  if (part.kind == Kind::R) return kRecompute;
  return action == Kind::I ? kInputGradient : kBackward;
}

/// All forwards, then the I of each micro-batch and the W of the one before it. The last micro-batch comes first.
Schedule split_backwards(const Layout& layout) {
  auto lists = fill(layout);
  const auto add = [&](Kind kind, int micro_batch) {
    for (int stage = layout.stages; stage-- > 0;) lists[layout.placement[stage]].push_back({kind, stage, micro_batch});
  };
  for (int m = layout.micro_batches; m-- > 0;) {
    add(Kind::I, m);
    if (m + 1 < layout.micro_batches) add(Kind::W, m + 1);
  }
  add(Kind::W, 0);
  return lists;
}

/// Adds the duration of each layer's part, from one stage's actions of one kind and its marks, both in order of time.
void add(Times& times, const std::vector<const Span*>& spans, const std::vector<LayerTrace::Mark>& marks) {
  for (const Span* span : spans) {
    const auto first = std::ranges::lower_bound(marks, span->start, {}, &LayerTrace::Mark::start);
    const auto last = std::ranges::lower_bound(first, marks.end(), span->end, {}, &LayerTrace::Mark::start);
    for (auto mark = first; mark != last; ++mark) {
      const double start = mark == first ? span->start : mark->start;
      const double end = mark + 1 == last ? span->end : (mark + 1)->start;
      times[mark->part.layer][index_of(mark->part, span->action.kind)].push_back(end - start);
    }
  }
}

/// Uses only the spans that overlapped other stages' work most, as in a full pipeline; of split backwards, I and W.
void add(Times& times, const Timeline& timeline, const std::vector<LayerTrace::Mark>& marks,
         const std::vector<std::int64_t>& balance) {
  const bool splits = std::ranges::any_of(timeline.spans, [](auto& span) { return span.action.kind == Kind::I; });
  const auto ends = stage_ends(balance);
  std::vector<std::vector<LayerTrace::Mark>> of_stage(balance.size());
  for (const auto& mark : marks) of_stage[stage_of(mark.part.layer, ends)].push_back(mark);
  for (const auto& [action, spans] : most_overlapped(timeline)) {
    const auto [stage, kind] = action;
    if (!splits || kind == Kind::I) add(times, spans, of_stage[stage]);
  }
}

/// The median seconds of each stage's W, of those that overlapped other stages' work most.
std::vector<double> seconds_of_weights(const Timeline& timeline, std::size_t stages) {
  std::vector<double> medians(stages);
  for (const auto& [action, spans] : most_overlapped(timeline)) {
    if (action.second != Kind::W) continue;
    std::vector<double> seconds;
    for (const Span* span : spans) seconds.push_back(span->end - span->start);
    medians[action.first] = median(seconds);
  }
  return medians;
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

  Profile run(bool plain) {
    auto profile = describe();
    measure_times(profile, plain);
    read_memory(profile, plain);
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
    for (const auto& tensor : batch_.tensors()) profile.input_requires_grad |= tensor.requires_grad();
    absl::flat_hash_set<const void*> counted;
    for (int i = 0; i < layers_; ++i) {
      auto& layer = profile.layers.emplace_back();
      layer.name = named_[i].name;
      // A shared tensor is counted in the first layer that has it.
      const auto add = [&](const at::Tensor& tensor, std::int64_t& sum) {
        const auto bytes = counted.insert(tensor.unsafeGetTensorImpl()).second ? bytes_of(tensor) : 0;
        sum += bytes;
        if (!tensor.requires_grad()) return;
        layer.gradients += bytes;
        if (!is_large(tensor)) layer.late_gradients += bytes;
      };
      for (const auto& parameter : named_[i].module->parameters()) add(parameter, layer.parameters);
      for (const auto& buffer : named_[i].module->buffers()) add(buffer, layer.buffers);
      layer.optimizer = static_cast<std::int64_t>((options_.param_scale() - 2) * static_cast<double>(layer.gradients));
    }
    find_sharing(profile, named_, device_.is_cpu() || options_.lends_between_devices());
    return profile;
  }

  /// A pipeline with one stage per worker. If it splits backwards, the layers up to the first ones with parameters are
  /// a stage of their own on the first worker: the backward of a stage whose inputs need no gradient does not split.
  TracedPipe make_pipe(const Profile& profile, std::vector<std::int64_t> balance, Mode mode) const {
    std::vector<int> placement(balance.size());
    std::iota(placement.begin(), placement.end(), 0);
    if (mode == Mode::kSplits && !profile.input_requires_grad) {
      const auto has_gradients = [](const LayerProfile& layer) { return layer.gradients > 0; };
      const auto found = std::find_if(profile.layers.begin(), profile.layers.end(), has_gradients);
      auto first = found - profile.layers.begin() + 1;
      const StageCost stage(profile);
      while (first < balance.front() && !stage.can_cut_before(static_cast<int>(first))) ++first;
      if (first < balance.front()) {
        balance.front() -= first;
        balance.insert(balance.begin(), first);
        placement.insert(placement.begin(), 0);
      }
    }
    const bool recomputes = mode == Mode::kRecomputes;
    TracedPipe traced{mode, std::make_shared<LayerTrace>(layers_, recomputes, device_)};
    auto options = GPipeOptions()
                       .devices(std::vector<torch::Device>(placement.back() + 1, device_))
                       .placement(placement)
                       .split_size(samples_)
                       .checkpoint(recomputes ? Checkpoint::kAlways : Checkpoint::kNever)
                       .intraop_threads(options_.intraop_threads());
    if (mode == Mode::kSplits) options.schedule_function(split_backwards);
    traced.pipe = GPipe(traced.trace->wrap(make_()), balance, options, LanguageBinding());
    traced.pipe->train();
    return traced;
  }

  void step(TracedPipe& traced, const Value& batch) const {
    try {
      traced.mode == Mode::kSplits ? trial_schedule(traced.pipe, batch) : trial_step(traced.pipe, batch);
    } catch (const c10::OutOfMemoryError&) {
      throw;  // profile() retries layer by layer
    } catch (...) {
      rethrow(traced);
    }
  }

  [[noreturn]] void rethrow(TracedPipe& traced) const {
    const auto failed = traced.pipe->last_error();
    if (!failed) throw;
    const bool backward = failed->action.kind != Kind::F;
    const int layer = failed->layer >= 0
                          ? std::min(failed->layer, layers_ - 1)  // the loss reads the last layer's output
                          : last_backward(traced, failed->action.stage);
    const auto name = layer < 0 ? "a layer" : absl::StrFormat("layer '%s'", named_[layer].name);
    std::throw_with_nested(std::runtime_error(absl::StrFormat("[profile] %s failed in its %s: %s", name,
                                                              backward ? "backward" : "forward", failed->message)));
  }

  /// The layer of a stage whose part of the backward began last; -1 for none.
  static int last_backward(TracedPipe& traced, int stage) {
    const auto ends = stage_ends(traced.pipe->balance());
    int layer = -1;
    for (const auto& [part, start] : traced.trace->take_marks()) {
      if (part.kind == Kind::B && stage_of(part.layer, ends) == stage) layer = part.layer;
    }
    return layer;
  }

  void measure_times(Profile& profile, bool plain) {
    const double start = now();
    const std::vector<Mode> whole = {Mode::kWhole};
    std::vector<std::int64_t> balance = {layers_};
    if (workers_ > 1) {
      for (auto& layer : profile.layers) layer.forward = 1;  // any equal cost, for a first cut
      run_steps(profile, cut(profile), whole, 1, start, 0);
      balance = cut(profile);
    }
    const std::vector<Mode> all = {Mode::kWhole, Mode::kRecomputes, Mode::kSplits};
    run_steps(profile, balance, plain ? whole : all, options_.repeats(), start, 0.3);
  }

  /// Cuts into one stage per worker, or fewer if layers that must be in one stage would be separated.
  std::vector<std::int64_t> cut(const Profile& profile) {
    const StageCost stage(profile);
    return balance_by_time(profile, std::min(workers_, stage.most_stages()), {.checkpoint = Checkpoint::kNever});
  }

  void run_steps(Profile& profile, const std::vector<std::int64_t>& balance, const std::vector<Mode>& modes,
                 int repeats, double start, double done) {
    std::vector<TracedPipe> pipes;
    for (const auto mode : modes) pipes.push_back(make_pipe(profile, balance, mode));
    for (auto& each : pipes) {
      report(done);
      try {
        step(each, batch_);
      } catch (const c10::OutOfMemoryError&) {
        throw;
      } catch (...) {
        if (each.mode != Mode::kRecomputes) throw;
        recomputes_ = false;  // for example, a layer writes to a parameter
      }
      each.trace->take_marks();
      each.pipe->trace(each.timeline);
    }
    if (!recomputes_) std::erase_if(pipes, [](const auto& each) { return each.mode == Mode::kRecomputes; });
    for (int repeat = 0; repeat < repeats; ++repeat) {
      const double used = std::min(1.0, (now() - start) / options_.seconds());
      if (repeat > 0 && used >= 1) break;
      report(done + (0.9 - done) * std::max(1.0 * repeat / options_.repeats(), used));
      for (auto& each : pipes) step(each, batch_);
    }
    Times times(layers_);
    for (const auto& each : pipes) add(times, *each.timeline, each.trace->take_marks(), each.pipe->balance());
    for (int i = 0; i < layers_; ++i) {
      auto& layer = profile.layers[i];
      for (std::size_t k = 0; k < kTimes.size(); ++k) layer.*kTimes[k] = median(times[i][k]);
      if (!recomputes_) layer.stored = layer.recompute = layer.forward;
    }
    if (modes.back() != Mode::kSplits) return;
    const auto& split = pipes.back().pipe->balance();
    share_weights(profile, split, seconds_of_weights(*pipes.back().timeline, split.size()));
  }

  /// Runs a step with one worker, and listens to its allocations.
  TracedPipe listen(const Profile& profile, Mode mode) const {
    report(0.9);
    auto traced = make_pipe(profile, {layers_}, mode);
    const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, traced.trace);
    if (mode == Mode::kSplits) traced.pipe->trace(traced.timeline);
    step(traced, batch_of_three_);
    return traced;
  }

  void read_memory(Profile& profile, bool plain) const {
    TracedPipe splits;
    if (!plain) splits = listen(profile, Mode::kSplits);
    const auto whole = listen(profile, Mode::kWhole);
    whole.trace->read_memory(
        profile, plain ? std::vector<LayerTrace::Saved>() : splits.trace->saved_for_weights(*splits.timeline));
    whole.trace->read_skips(profile, skip_links(named_));
    if (plain) return;
    if (recomputes_) listen(profile, Mode::kRecomputes).trace->read_memory(profile, {});
    splits.trace->read_split_memory(profile, *splits.timeline);
  }

  /// Divides the time of each stage's W among its layers, by how much less time their I takes than their B.
  static void share_weights(Profile& profile, const std::vector<std::int64_t>& balance,
                            const std::vector<double>& seconds) {
    auto layer = profile.layers.begin();
    for (std::size_t stage = 0; stage < balance.size(); ++stage) {
      const auto end = layer + static_cast<std::ptrdiff_t>(balance[stage]);
      const auto share = [&](auto part) {
        double all = 0;
        for (auto of = layer; of != end; ++of) all += part(*of);
        for (auto of = layer; of != end; ++of) of->weight_gradient = all > 0 ? seconds[stage] * part(*of) / all : 0;
        return all > 0;
      };
      const bool known = share([](const auto& of) { return std::max(0.0, of.backward - of.input_gradient); });
      if (!known) share([](const auto& of) { return of.backward; });
      layer = end;
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
  bool recomputes_ = true;  ///< whether the layers can be recomputed; else a recompute counts as a forward
  Value batch_;
  Value batch_of_three_;  ///< the last backward, micro-batch 0's, no longer allocates gradient sums
};

}  // namespace

Profile measure(const Model::MakeLayers& layers, const Value& sample, const ProfileOptions& options, bool plain) {
  return Measurement(layers, sample, options).run(plain);
}

}  // namespace gpipe
