#include "balance/measurement.h"

#include <sched.h>
#include <torch/nn/modules/linear.h>

#include <fstream>
#include <numeric>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_format.h"
#include "balance/cut.h"
#include "balance/layer_times.h"
#include "balance/memory_trace.h"
#include "balance/stage_cost.h"
#include "balance/trial.h"
#include "gpipe/autograd/stage.h"
#include "gpipe/base/clock.h"
#include "gpipe/run/step_input.h"
#include "gpipe/schedule/auto_schedule.h"

namespace gpipe {
namespace {

/// How the pipelines that are measured run: with whole backwards, forwards without graphs, split backwards, or in the order
/// of measuring_schedule().
enum class Mode { kWhole, kStored, kSplits, kMixed };

/// A layer of its own stage behind the model. The time of its actions is what every stage takes besides its layers.
class Identity : public Layer {
 public:
  explicit Identity(std::string name) : name_(std::move(name)) {}

  Value forward(Value input) override {
    auto tensors = input.tensors();
    for (auto& tensor : tensors) tensor = tensor.defined() ? tensor.view_as(tensor) : tensor;  // so that a graph runs
    return Value(input.form(), std::move(tensors));
  }
  const std::string& name() const override { return name_; }
  std::shared_ptr<torch::nn::Module> module() const override { return module_; }

 private:
  const std::string name_;
  const std::shared_ptr<torch::nn::Module> module_ = std::make_shared<torch::nn::IdentityImpl>();
};

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

/// How many cores this process may use.
int cores() {
  cpu_set_t set;
  int count = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
  double quota = 0;
  double period = 0;
  if (std::ifstream("/sys/fs/cgroup/cpu.max") >> quota >> period) {  // of a container
    count = std::min(count, static_cast<int>(quota / period));
  }
  return count;
}

class Measurement {
 public:
  Measurement(const Model::MakeLayers& make, const Value& sample, const ProfileOptions& options)
      : make_(make), options_(options), samples_(batch_size(sample)), device_(sample.tensors().front().device()) {
    for (const auto& layer : make_()) named_.push_back({layer->name(), layer->module()});
    batch_of_three_ = batch(3, sample);
    profile_ = describe();
    cut_everywhere();
    batch_ = batch(2 * std::max(2, workers_), sample);
  }

  Profile run(bool plain) {
    const auto modes = plain ? std::vector{Mode::kWhole} : std::vector{Mode::kSplits, Mode::kStored, Mode::kWhole};
    for (;;) {
      try {
        measure_times(plain ? modes : std::vector{Mode::kMixed, Mode::kStored});
        read_memory(modes);
        report(1);
        return std::move(profile_);
      } catch (const std::runtime_error&) {
        if (!is_cut_at_fault()) throw;
      }
    }
  }

 private:
  /// A pipeline of stages and two identities behind them. The second identity also handles the outputs.
  struct TracedPipe {
    Mode mode = Mode::kWhole;
    std::vector<int> ends;  ///< of the stages: the index after the last layer
    GPipe pipe{nullptr};
    std::shared_ptr<Timeline> timeline = std::make_shared<Timeline>();  ///< of the steps that are traced
  };

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
                    .workers = options_.workers(),
                    .intraop_threads = options_.intraop_threads()};
    for (const auto& tensor : batch_of_three_.tensors()) profile.input_requires_grad |= tensor.requires_grad();
    absl::flat_hash_set<const void*> counted;
    for (const auto& [name, module] : named_) {
      auto& layer = profile.layers.emplace_back(LayerProfile{name});
      // A shared tensor is counted in the first layer that has it.
      const auto add = [&](const at::Tensor& tensor, std::int64_t& sum) {
        const auto bytes = counted.insert(tensor.unsafeGetTensorImpl()).second ? bytes_of(tensor) : 0;
        sum += bytes;
        if (!tensor.requires_grad()) return;
        layer.gradients += bytes;
        if (!is_large(tensor)) layer.late_gradients += bytes;
      };
      for (const auto& parameter : module->parameters()) add(parameter, layer.parameters);
      for (const auto& buffer : module->buffers()) add(buffer, layer.buffers);
      layer.optimizer = static_cast<std::int64_t>((options_.param_scale() - 2) * static_cast<double>(layer.gradients));
    }
    find_sharing(profile, named_, device_.is_cpu() || options_.lends_between_devices());
    return profile;
  }

  void cut_everywhere() {
    ends_.clear();
    const StageCost cost(profile_);
    for (int layer = 1; layer <= cost.layers(); ++layer) {
      if (cost.can_cut_before(layer)) ends_.push_back(layer);
    }
    workers_ = std::min(options_.workers(), static_cast<int>(ends_.size()));
  }

  /// After a failure: if the uncut model runs, notes that it cannot be cut before the stage that failed. For example, a
  /// layer changes in place what an earlier layer returned twice.
  bool is_cut_at_fault() {
    const auto stage = std::exchange(failed_stage_, 0);
    if (stage < 1 || stage >= std::ssize(ends_)) return false;
    const int previous = stage > 1 ? ends_[stage - 2] : 0;
    auto fresh = describe();
    for (std::size_t i = 0; i < named_.size(); ++i) fresh.layers[i].shares_with = profile_.layers[i].shares_with;
    auto& before = fresh.layers[ends_[stage - 1]].shares_with;
    before = std::min(before, previous);
    ends_ = {static_cast<int>(named_.size())};
    try {
      auto whole = make_pipe(failed_mode_, ends_, {0});
      step(whole, batch_of_three_);
    } catch (...) {
      return false;
    }
    profile_ = std::move(fresh);
    cut_everywhere();
    return true;
  }

  /// `workers`: of each stage.
  TracedPipe make_pipe(Mode mode, const std::vector<int>& ends, std::vector<int> workers,
                       const std::shared_ptr<MemoryTrace>& memory = nullptr) const {
    workers.insert(workers.end(), 2, workers.back());
    auto layers = make_();
    for (const auto* name : {"behind the model", "the end"}) layers.push_back(std::make_unique<Identity>(name));
    auto balance = balance_of(ends);
    balance.insert(balance.end(), 2, 1);
    auto options = GPipeOptions()
                       .devices(std::vector<torch::Device>(workers.back() + 1, device_))
                       .placement(workers)
                       .split_size(samples_)
                       .checkpoint(Checkpoint::kNever)
                       .intraop_threads(options_.intraop_threads());
    if (mode == Mode::kSplits) options.schedule_function(split_backwards);
    if (mode == Mode::kMixed) options.schedule_function(measuring_schedule);
    TracedPipe traced{mode, ends};
    traced.pipe =
        GPipe(memory ? memory->wrap(std::move(layers)) : std::move(layers), balance, options, LanguageBinding());
    traced.pipe->train();
    return traced;
  }

  void step(TracedPipe& traced, const Value& batch) {
    try {
      if (traced.mode == Mode::kWhole) return trial_step(traced.pipe, batch);
      if (traced.mode != Mode::kStored) return trial_schedule(traced.pipe, batch);
      const at::NoGradGuard no_grad;
      traced.pipe->forward(batch);
    } catch (...) {
      const auto failed = traced.pipe->last_error();
      if (!failed) throw;
      failed_stage_ = traced.ends == ends_ ? failed->action.stage : 0;
      failed_mode_ = traced.mode;
      const auto last = std::min(failed->action.stage, static_cast<int>(traced.ends.size()) - 1);  // before identities
      const int layer = failed->layer >= 0 && failed->layer < ends_.back() ? failed->layer : traced.ends[last] - 1;
      std::throw_with_nested(std::runtime_error(
          absl::StrFormat("[profile] layer '%s' failed in its %s: %s", named_[layer].name,
                          failed->action.kind == Kind::F ? "forward" : "backward", failed->message)));
    }
  }

  void measure_times(const std::vector<Mode>& modes) {
    const double start = now();
    auto workers = std::vector<int>(ends_.size());
    if (workers_ > 1) {
      for (const int end : ends_) profile_.layers[end - 1].forward = 1;  // any equal cost, for a first cut
      run_steps(ends_, workers_of(cut()), {Mode::kWhole}, 1, start, {0, 0.2});
      workers = workers_of(cut());
    }
    const bool is_finest = workers_ == std::ssize(ends_);
    run_steps(ends_, workers, modes, options_.repeats(), start, {0.2, is_finest ? 0.9 : 0.6});
    if (is_finest) return;
    // The finest stages take longer than layers of one stage: they have more edges, and take more locks. So their times
    // only tell how to share a stage's time among its layers.
    std::vector<int> each_worker(workers_);
    std::iota(each_worker.begin(), each_worker.end(), 0);
    run_steps(stage_ends(cut()), each_worker, modes, options_.repeats(), start, {0.6, 0.9});
  }

  /// Cuts into one stage per worker.
  std::vector<std::int64_t> cut() const {
    return balance_by_time(profile_, workers_, {.checkpoint = Checkpoint::kNever});
  }

  /// The workers of the finest stages, if each worker gets the layers of one stage of a balance.
  std::vector<int> workers_of(const std::vector<std::int64_t>& balance) const {
    std::vector<int> workers;
    for (const int end : ends_) workers.push_back(stage_of(end - 1, stage_ends(balance)));
    return workers;
  }

  /// `done`: the part of all work that is done before and after.
  void run_steps(const std::vector<int>& ends, const std::vector<int>& workers, const std::vector<Mode>& modes,
                 int repeats, double start, std::pair<double, double> done) {
    std::vector<TracedPipe> pipes;
    for (const auto mode : modes) pipes.push_back(make_pipe(mode, ends, workers));
    const auto& batch = modes.front() == Mode::kWhole ? batch_of_three_ : batch_;  // it keeps all micro-batches
    for (auto& each : pipes) {
      report(done.first);
      step(each, batch);
      each.pipe->trace(each.timeline);
    }
    for (int repeat = 0; repeat < repeats; ++repeat) {
      const double used = (now() - start) / (done.second / 0.9 * options_.seconds());
      if (repeat > 0 && used >= 1) break;
      const double part = std::min(1.0, std::max(1.0 * repeat / options_.repeats(), used));
      report(done.first + (done.second - done.first) * part);
      for (auto& each : pipes) step(each, batch);
    }
    const bool has_cores = workers_ * options_.intraop_threads() <= cores();  // else workers wait for each other
    for (const auto& each : pipes) {
      for (auto& span : each.timeline->spans) span.queued = has_cores ? span.queued : 0;
      read_times(profile_, ends, each.timeline->spans, each.mode == Mode::kStored);
    }
  }

  /// Runs a step with one worker, and listens to its allocations.
  TracedPipe listen(Mode mode, MemoryTrace& memory) {
    report(0.9);
    auto traced = make_pipe(mode, ends_, std::vector<int>(ends_.size()), memory.shared_from_this());
    const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, memory.shared_from_this());
    traced.pipe->trace(traced.timeline);
    step(traced, batch_of_three_);
    return traced;
  }

  void read_memory(const std::vector<Mode>& modes) {
    std::vector<MemoryTrace::Saved> saved;
    for (const auto mode : modes) {
      const auto memory = std::make_shared<MemoryTrace>();
      const auto traced = listen(mode, *memory);
      const MemoryTrace::Step step{ends_, traced.timeline->spans};
      if (mode == Mode::kStored) memory->read_stored(profile_, step);
      if (mode == Mode::kSplits) {
        memory->read_split(profile_, step);
        saved = memory->saved_for_weights(step);
      }
      if (mode != Mode::kWhole) continue;
      memory->read_whole(profile_, step, saved);
      memory->read_skips(profile_, skip_links(named_));
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
  Profile profile_;
  std::vector<int> ends_;  ///< of the finest stages: the index after the last layer
  int workers_ = 1;
  int failed_stage_ = 0;
  Mode failed_mode_ = Mode::kWhole;
  Value batch_;           ///< of so many micro-batches that every kind of action runs twice
  Value batch_of_three_;  ///< the last backward, micro-batch 0's, no longer allocates gradient sums
};

}  // namespace

Profile measure(const Model::MakeLayers& layers, const Value& sample, const ProfileOptions& options, bool plain) {
  return Measurement(layers, sample, options).run(plain);
}

}  // namespace gpipe
