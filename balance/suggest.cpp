#include "balance/suggest.h"
#include "absl/strings/str_format.h"

#include "balance/measurement.h"
#include "balance/trial.h"
#include "gpipe/base/checks.h"
#include "gpipe/base/clock.h"
#include "gpipe/run/step_input.h"
#include "gpipe/schedules.h"
#include "gpipe/tensors/torch_internals.h"

namespace gpipe {
namespace {

/// With less time for measurements, the search moves fewer cuts.
constexpr double kSecondsOfFullSearch = 10;

/// The numbers of micro-batches that result from these numbers of chunks, once each, the usual ones first.
std::vector<int> possible(std::vector<int> chunks, std::int64_t samples) {
  if (chunks.empty()) chunks = {4, 8, 2, 16, 1, 32};
  std::vector<int> counts;
  for (const int wanted : chunks) {
    const auto count = static_cast<int>(micro_batch_sizes(samples, wanted, /*split_size=*/0).size());
    if (std::ranges::find(counts, count) == counts.end()) counts.push_back(count);
  }
  return counts;
}

void check_devices(const std::vector<torch::Device>& devices) {
  if (devices.empty()) refuse_argument("give at least one device");
}

/// Returns the scheduling with its placement. Errors: std::invalid_argument for a schedule that does not exist or fit.
Scheduling complete(Scheduling scheduling, const Model& model, std::size_t devices, const std::vector<int>& counts) {
  const auto& name = scheduling.schedule.empty() ? kFillAndDrain : scheduling.schedule;
  if (name.starts_with('@')) scheduling.placement = read_schedule(name.substr(1)).layout.placement;
  int per_worker = scheduling.placement.empty() ? scheduling.stages_per_worker : 1;
  if (per_worker == 1 && scheduling.placement.empty()) {  // as many as the rule needs
    const auto workers = static_cast<int>(devices);
    const Layout one_each{workers, std::ranges::max(counts), looped_placement(workers, workers)};
    const bool fits = too_few_stages(name, one_each.placement).empty() && schedule_rule(name).misfit(one_each).empty();
    per_worker = fits ? 1 : 2;
  }
  if (per_worker < 1) refuse_argument("stages_per_worker must be positive, but is ", per_worker);
  const auto stages = scheduling.placement.empty() ? devices * per_worker : scheduling.placement.size();
  const auto layers = model.named_layers().size();
  if (stages > layers) refuse_argument(stages, " stages need as many layers, but the model has ", layers);
  const auto source = schedule_source(name, static_cast<int>(stages), per_worker, scheduling.placement);
  for (const int count : counts) source.make({static_cast<int>(stages), count, source.placement});
  return {scheduling.schedule, 1, source.placement};
}

/// Returns the schedulings to try, with their placements. Errors: as complete().
std::vector<Scheduling> schedulings(const Scheduling& wanted, const Model& model, std::size_t devices,
                                    const std::vector<int>& counts) {
  if (wanted.schedule != kAnySchedule) return {complete(wanted, model, devices, counts)};
  const auto workers = static_cast<int>(devices);
  auto found = all_schedulings(workers, static_cast<int>(model.named_layers().size()));
  std::erase_if(found, [&](const Scheduling& it) {
    if (!wanted.placement.empty()) return it.placement != wanted.placement;
    const auto per_worker = static_cast<int>(it.placement.size()) / workers;
    return wanted.stages_per_worker != 1 && per_worker != wanted.stages_per_worker;
  });
  if (found.empty()) {
    refuse_argument("no schedule fits ", workers, " devices, ", model.named_layers().size(),
                    " layers and the wanted placement");
  }
  return found;
}

/// Gives an accelerator without index the index 0, as GPipe does.
std::vector<torch::Device> with_index(std::vector<torch::Device> devices) {
  for (auto& device : devices) {
    if (!device.is_cpu() && !device.has_index()) device.set_index(0);
  }
  return devices;
}

void synchronize(const std::vector<torch::Device>& devices) {
  for (const auto& device : devices) {
    if (!device.is_cpu()) c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
  }
}

/// Makes the profiles of one call of suggest(). They share its time budget and its progress.
class Profiling {
 public:
  Profiling(const Model& model, const Value& sample, const std::vector<torch::Device>& devices,
            const SuggestOptions& options, const std::vector<int>& counts)
      : model_(model), sample_(sample), device_(devices.front()), options_(options.profile()) {
    const auto cpus = std::count_if(devices.begin(), devices.end(), [](const auto& device) { return device.is_cpu(); });
    cpu_stages_ = device_.is_cpu() ? static_cast<int>(cpus) : 1;
    has_whole_ = std::ranges::find(counts, 1) != counts.end() &&
                 (!device_.is_cpu() || (cpu_stages_ == 1 && options_.intraop_threads() == 0));
    profiles_ = static_cast<double>(counts.size()) + (has_whole_ ? 0 : 1);
  }

  /// Profiles the micro-batches of a mini-batch of `chunks`, with all CPU stages running at once.
  Profile of_stages(int chunks) const {
    const auto sizes = micro_batch_sizes(batch_size(sample_), chunks, /*split_size=*/0);
    auto options = options_;
    return run(first_micro_batch(sample_, sizes), options.workers(cpu_stages_), /*plain=*/false);
  }

  /// Profiles the whole mini-batch, with nothing else running.
  Profile of_whole() const {
    auto options = options_;
    done_ = profiles_ - 1;  // others may have been left out
    if (device_.is_cpu()) options.intraop_threads(0);
    return run(sample_, options.workers(1), /*plain=*/true);
  }

  /// Whether of_stages(1) is the same as of_whole().
  bool has_whole() const { return has_whole_; }

  /// Whether less than half of the planned time is left for each further profile.
  bool is_late() const { return seconds_left() < options_.seconds() / profiles_ / 2; }

  /// Whether the caller's progress function has thrown, to stop suggest().
  bool stopped() const { return stopped_; }

  void finish() const {
    if (options_.progress() && done_ < profiles_) options_.progress()(1);
  }

 private:
  /// For each profile that is left.
  double seconds_left() const { return (options_.seconds() - (now() - start_)) / std::max(1.0, profiles_ - done_); }

  Profile run(const Value& micro_batch, ProfileOptions options, bool plain) const {
    options.seconds(std::max(0.0, seconds_left()));
    const double done = done_++;
    if (options_.progress()) {
      options.progress([&](double part) {
        stopped_ = true;
        options_.progress()((done + part) / profiles_);
        stopped_ = false;
      });
    }
    return profile(model_, copy_of(micro_batch, device_), options, plain);
  }

  const Model& model_;
  const Value& sample_;
  const torch::Device device_;
  const ProfileOptions options_;
  const double start_ = now();
  int cpu_stages_ = 1;
  bool has_whole_ = false;
  double profiles_ = 0;  // to be made
  mutable double done_ = 0;
  mutable bool stopped_ = false;
};

std::optional<Candidate> unpartitioned(const Profiling& profiling, const std::vector<ChunkedProfile>& profiles,
                                       const SuggestOptions& options) {
  try {
    const auto& first = profiles.front();
    const auto whole = profiling.has_whole() && first.chunks == 1 ? first.profile : profiling.of_whole();
    return make_candidate(whole, {static_cast<std::int64_t>(whole.layers.size())},
                          {.chunks = 1, .checkpoint = Checkpoint::kNever}, {.memory_limit = options.memory_limit()});
  } catch (const std::runtime_error&) {
    if (profiling.stopped()) throw;
    return std::nullopt;
  }
}

}  // namespace

bool copies_between(const std::vector<torch::Device>& devices) {
  const auto indexed = with_index(devices);
  return std::adjacent_find(indexed.begin(), indexed.end(), std::not_equal_to<>()) != indexed.end();
}

SearchOptions search_options(const std::vector<torch::Device>& devices, std::int64_t memory_limit, double bandwidth) {
  SearchOptions options{
      .memory_limit = memory_limit, .network = {.inside = {.bandwidth = bandwidth}}, .copies = copies_between(devices)};
  for (const auto& device : with_index(devices)) {
    const auto worker = options.devices.size();
    options.devices.push_back(device.is_cpu() ? absl::StrFormat("the CPU of worker %d", worker) : device.str());
  }
  return options;
}

Suggestion suggest(const Model& model, const Value& sample, const std::vector<torch::Device>& wanted,
                   const SuggestOptions& options) {
  check_devices(wanted);
  const auto devices = with_index(wanted);
  const auto counts = possible(options.chunks(), batch_size(sample));
  auto to_try = schedulings(options.scheduling(), model, devices.size(), counts);
  const Profiling profiling(model, sample, devices, options, counts);
  std::vector<ChunkedProfile> profiles;
  std::exception_ptr first_error;
  for (const int chunks : counts) {
    const bool is_required = !options.chunks().empty();
    if (!is_required && !profiles.empty() && profiling.is_late()) break;
    try {
      profiles.push_back({chunks, profiling.of_stages(chunks)});
    } catch (const std::runtime_error&) {
      // Micro-batches of other chunks may be too large for the device, or too small for batch norm.
      if (profiling.stopped() || is_required) throw;
      if (!first_error) first_error = std::current_exception();
    }
  }
  if (profiles.empty()) std::rethrow_exception(first_error);
  std::ranges::sort(profiles, {}, &ChunkedProfile::chunks);
  auto searched = search_options(devices, options.memory_limit(), options.bandwidth());
  searched.checkpoints = options.checkpoints();
  searched.schedulings = std::move(to_try);
  const auto seconds = std::min(options.profile().seconds(), kSecondsOfFullSearch);
  searched.most_actions =
      static_cast<std::int64_t>(seconds / kSecondsOfFullSearch * static_cast<double>(searched.most_actions));
  auto suggestion = search(std::move(profiles), searched);
  suggestion.unpartitioned = unpartitioned(profiling, suggestion.profiles, options);
  profiling.finish();
  return suggestion;
}

std::vector<Measured> refine(const Model& model, const Value& sample, const std::vector<torch::Device>& wanted,
                             const Suggestion& suggestion, int candidates, int repeats, int intraop_threads,
                             const std::function<void(double)>& progress) {
  check_devices(wanted);
  const auto devices = with_index(wanted);
  if (candidates < 1 || repeats < 1) {
    refuse_argument("candidates and repeats must be positive, but are ", candidates, " and ", repeats);
  }
  suggestion.best();  // throws if nothing fits
  const at::AutoGradMode grad_mode(true);
  const RestoreModule restore(model.module());
  const auto fitting = std::ranges::count_if(suggestion.candidates, &Candidate::fits);
  const auto wanted_steps = static_cast<double>(std::min<std::ptrdiff_t>(candidates, fitting)) * (repeats + 1);
  double steps = 0;
  std::vector<Measured> measured;
  for (const auto& candidate : suggestion.candidates) {
    if (!candidate.fits || static_cast<int>(measured.size()) == candidates) break;
    auto pipe_options = GPipeOptions().devices(devices).intraop_threads(intraop_threads);
    pipe_options.chunks(candidate.chunks).checkpoint(candidate.checkpoint).placement(candidate.placement);
    if (!candidate.schedule.empty()) pipe_options.schedule(candidate.schedule);
    GPipe pipe(restore.wrap(model.layers()), candidate.balance, pipe_options, LanguageBinding());
    pipe->train();
    std::vector<double> seconds;
    for (int repeat = -1; repeat < repeats; ++repeat) {  // the first is a warm-up
      const auto batch = copy_of(sample);                // the first layer may change it in place
      synchronize(devices);
      const double start = now();
      candidate.schedule.empty() ? trial_step(pipe, batch) : trial_schedule(pipe, batch);
      synchronize(devices);
      if (repeat >= 0) seconds.push_back(now() - start);
      if (progress) progress(++steps / wanted_steps);
    }
    measured.push_back({candidate, median(seconds)});
  }
  restore.check();
  std::ranges::stable_sort(measured, {}, &Measured::seconds);
  return measured;
}

}  // namespace gpipe
