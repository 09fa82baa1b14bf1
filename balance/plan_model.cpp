#include "balance/plan_model.h"

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

/// Gives an accelerator without index the index 0, as GPipe does.
std::vector<torch::Device> with_index(std::vector<torch::Device> devices) {
  for (auto& device : devices) {
    if (!device.is_cpu() && !device.has_index()) device.set_index(0);
  }
  return devices;
}

/// Names for PlanOptions. Each CPU worker counts as a device.
std::vector<std::string> device_names(const std::vector<torch::Device>& devices) {
  std::vector<std::string> names;
  for (const auto& device : devices) {
    names.push_back(device.is_cpu() ? absl::StrFormat("the CPU of worker %d", names.size()) : device.str());
  }
  return names;
}

void synchronize(const std::vector<torch::Device>& devices) {
  for (const auto& device : devices) {
    if (!device.is_cpu()) c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
  }
}

/// Makes the profiles of one call of plan(). They share its time budget and its progress.
class Profiling {
 public:
  Profiling(const Model& model, const Value& sample, const std::vector<torch::Device>& devices,
            const MeasureOptions& options, const std::vector<int>& counts)
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

  /// Whether the caller's progress function has thrown, to stop plan().
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

std::optional<Plan> unpartitioned(const Profiling& profiling, const std::vector<Profile>& profiles, const Value& sample,
                                  const PlanOptions& options) {
  try {
    const auto& largest = profiles.back();
    const bool is_known = profiling.has_whole() && largest.samples == batch_size(sample);
    const auto whole = is_known ? largest : profiling.of_whole();
    Plan plan{predict(whole, {static_cast<std::int64_t>(whole.layers.size())}, {.checkpoint = Checkpoint::kNever})};
    if (!options.memory.empty()) plan.missing = std::max<std::int64_t>(0, plan.bytes.front() - options.memory.front());
    return plan;
  } catch (const std::runtime_error&) {
    if (profiling.stopped()) throw;
    return std::nullopt;
  }
}

/// The median seconds of a few steps of a plan.
double pilot(const Plan& plan, std::vector<std::unique_ptr<Layer>> layers, const Value& sample,
             const std::vector<torch::Device>& devices, int intraop_threads) {
  constexpr int kSteps = 3;
  auto options = GPipeOptions().devices(devices).intraop_threads(intraop_threads).placement(plan.placement);
  options.chunks(plan.chunks).checkpoint(plan.checkpoint).schedule(plan.schedule);
  GPipe pipe(std::move(layers), plan.balance, options, LanguageBinding());
  pipe->train();
  std::vector<double> seconds;
  for (int step = -1; step < kSteps; ++step) {  // the first warms up
    const auto batch = copy_of(sample);         // the first layer may change it in place
    synchronize(devices);
    const double start = now();
    trial_schedule(pipe, batch);
    synchronize(devices);
    if (step >= 0) seconds.push_back(now() - start);
  }
  return median(seconds);
}

/// Runs the first plans, and puts the fastest of them first.
void run_pilots(Plans& plans, const Model& model, const Value& sample, const std::vector<torch::Device>& devices,
                const MeasureOptions& measuring) {
  const at::AutoGradMode grad_mode(true);
  const RestoreModule restore(model.module());
  const bool drains = fills_and_drains(plans.best().schedule);
  std::vector<std::pair<double, std::size_t>> measured;
  std::exception_ptr first_error;
  int failures = 0;
  for (std::size_t i = 0; i < plans.plans.size() && std::ssize(measured) < measuring.pilots() && failures < 5; ++i) {
    const auto& plan = plans.plans[i];
    if (!plan.fits() || fills_and_drains(plan.schedule) != drains || plan.replicas > 1) continue;
    if (measuring.profile().progress()) measuring.profile().progress()(1);  // may throw to stop
    try {
      const auto seconds =
          pilot(plan, restore.wrap(model.layers()), sample, devices, measuring.profile().intraop_threads());
      measured.emplace_back(seconds, i);
    } catch (const std::exception&) {  // e.g. memory runs out, or a layer cannot be recomputed
      if (failures++ == 0) first_error = std::current_exception();
      plans.plans.erase(plans.plans.begin() + static_cast<std::ptrdiff_t>(i--));
    }
  }
  if (measured.empty() && first_error) std::rethrow_exception(first_error);
  if (measured.empty()) return;
  for (const auto& [seconds, i] : measured) plans.plans[i].measured = seconds;
  const auto fastest = std::ranges::min(measured).second;
  const auto first = plans.plans.begin();
  std::rotate(first, first + static_cast<std::ptrdiff_t>(fastest), first + static_cast<std::ptrdiff_t>(fastest) + 1);
  restore.check();
}

}  // namespace

bool copies_between(const std::vector<torch::Device>& devices) {
  const auto indexed = with_index(devices);
  return std::adjacent_find(indexed.begin(), indexed.end(), std::not_equal_to<>()) != indexed.end();
}

Plans plan(const Model& model, const Value& sample, const std::vector<torch::Device>& wanted, PlanOptions options,
           const MeasureOptions& measuring) {
  if (wanted.empty()) refuse_argument("give at least one device");
  const auto devices = with_index(wanted);
  options.samples = batch_size(sample);
  if (options.devices.empty()) options.devices = device_names(devices);
  options.copies |= copies_between(devices);
  for (auto& bytes : options.memory) bytes -= bytes / 50;  // a step can need a little more than its simulation
  const auto counts = options.chunks = possible(measuring.chunks(), options.samples);
  const Profiling profiling(model, sample, devices, measuring, counts);
  std::vector<Profile> profiles;
  std::exception_ptr first_error;
  for (const int chunks : counts) {
    const bool is_required = counts.size() == 1;
    if (!is_required && !profiles.empty() && profiling.is_late()) break;
    try {
      profiles.push_back(profiling.of_stages(chunks));
    } catch (const std::runtime_error&) {
      // Micro-batches of other chunks may be too large for the device, or too small for batch norm.
      if (profiling.stopped() || is_required) throw;
      if (!first_error) first_error = std::current_exception();
    }
  }
  if (profiles.empty()) std::rethrow_exception(first_error);
  std::ranges::sort(profiles, {}, &Profile::samples);
  auto plans = plan(profiles, options);
  plans.unpartitioned = unpartitioned(profiling, profiles, sample, options);
  profiling.finish();
  if (plans.fits() && measuring.pilots() > 0) run_pilots(plans, model, sample, devices, measuring);
  return plans;
}

}  // namespace gpipe
