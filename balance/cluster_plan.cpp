#include "balance/cluster_plan.h"

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "gpipe/schedule/schedules.h"

namespace gpipe {
namespace {

using absl::StrFormat;

/// Most actions that are simulated to move cuts, for all numbers of replicas together.
constexpr std::int64_t kMostActions = 2'000'000;

/// A number of micro-batches and a checkpoint mode for a number of replicas.
struct Case {
  const Profile* profile;
  int chunks;
  Checkpoint checkpoint;
  double least_seconds;  ///< of a step, with any schedule
};

/// The time of a step if no worker ever waited.
double least_seconds(const Profile& profile, int chunks, Checkpoint checkpoint, int workers) {
  double once = 0;
  double again = 0;  // more for a micro-batch that is recomputed
  for (const auto& layer : profile.layers) {
    once += layer.forward + std::min(layer.backward, layer.input_gradient + layer.weight_gradient);
    again += layer.stored + layer.recompute - layer.forward;
  }
  int recomputed = 0;
  for (int m = 0; m < chunks; ++m) recomputed += recomputes(checkpoint, m, chunks) ? 1 : 0;
  return (chunks * once + recomputed * again) / workers;
}

/// Returns the cases for a number of replicas, those that can be fastest first.
std::vector<Case> cases_of(const std::vector<Profile>& profiles, const ClusterPlanOptions& options, int replicas,
                           int workers) {
  std::vector<Case> cases;
  for (const auto& profile : profiles) {
    const auto per_turn = replicas * profile.samples;
    if (options.samples % per_turn != 0 || options.samples / per_turn * workers > kMostPlannedCells) continue;
    const auto chunks = static_cast<int>(options.samples / per_turn);
    for (const auto mode : options.checkpoints) {
      cases.push_back({&profile, chunks, mode, least_seconds(profile, chunks, mode, workers)});
    }
  }
  std::stable_sort(cases.begin(), cases.end(),
                   [](const Case& a, const Case& b) { return a.least_seconds < b.least_seconds; });
  return cases;
}

std::vector<Scheduling> schedulings_of(const std::string& schedule, int workers, int most_stages) {
  if (schedule.empty()) return {{.placement = looped_placement(workers, workers)}};
  auto found = all_schedulings(workers, most_stages);
  if (schedule == kAnySchedule) return found;
  std::erase_if(found, [&](const auto& each) { return each.schedule != schedule; });
  const auto looped = looped_placement(workers, workers);
  const bool left_out = found.empty() && schedule_rule(schedule).misfit({workers, 1, looped}).empty();
  if (left_out) found.push_back({schedule, 1, looped});  // because another schedule has the same lists
  return found;
}

void check_plan(const Cluster& cluster, const std::vector<Profile>& profiles, const ClusterPlanOptions& options) {
  if (cluster.hosts < 1 || cluster.devices_per_host < 1 || cluster.hosts > kMostDevices / cluster.devices_per_host) {
    throw std::invalid_argument(StrFormat("[suggest] a cluster has 1 to %d devices, but got %d hosts of %d devices",
                                          kMostDevices, cluster.hosts, cluster.devices_per_host));
  }
  check(cluster.network(1));
  if (cluster.memory < 0) {
    throw std::invalid_argument(StrFormat("[suggest] memory must not be negative, but is %d", cluster.memory));
  }
  if (profiles.empty()) throw std::invalid_argument("[suggest] give at least one profile");
  if (options.checkpoints.empty()) throw std::invalid_argument("[suggest] give at least one checkpoint mode");
  if (options.samples < 1) {
    throw std::invalid_argument(StrFormat("[suggest] samples must be positive, but is %d", options.samples));
  }
  if (!options.schedule.empty() && options.schedule != kAnySchedule) schedule_rule(options.schedule);
  for (const auto& profile : profiles) {
    if (profile.samples < 1) {
      throw std::invalid_argument(
          StrFormat("[suggest] a profile must have at least one sample, but has %d", profile.samples));
    }
    if (profile.layers.size() == profiles.front().layers.size()) continue;
    throw std::invalid_argument(StrFormat("[suggest] profiles have %d and %d layers; give profiles of one model",
                                          profiles.front().layers.size(), profile.layers.size()));
  }
}

/// Whether `a` is better than `b`: as is_better(), but if neither fits, the one that needs fewer bytes on a device.
bool is_better_plan(const Candidate& a, const Candidate& b) {
  if (a.fits || b.fits) return is_better(a, b);
  return std::ranges::max(a.bytes) < std::ranges::max(b.bytes);
}

/// The choices for one number of replicas.
class Replicated {
 public:
  Replicated(const Cluster& cluster, int replicas, std::vector<Scheduling> schedulings)
      : options_{.memory_limit = cluster.memory,
                 .network = cluster.network(replicas),
                 .copies = true,
                 .schedulings = std::move(schedulings),
                 .most_actions = 0} {}

  /// Keeps the best of all schedules if it is better than those of the cases before.
  void offer(const Case& next) {
    if (case_ && best_.fits && next.least_seconds >= best_.seconds) return;
    auto candidate = search_in(next).candidates.front();
    if (case_ && !is_better_plan(candidate, best_)) return;
    best_ = std::move(candidate);
    case_ = next;
  }

  /// Moves the best candidate's cuts. Returns it as the only candidate.
  Suggestion improve(std::int64_t most_actions) {
    options_.schedulings = {{best_.schedule, 1, best_.placement}};
    options_.most_actions = most_actions;
    return search_in(*case_);
  }

 private:
  Suggestion search_in(const Case& next) {
    options_.checkpoints = {next.checkpoint};
    return search({{next.chunks, *next.profile}}, options_);
  }

  SearchOptions options_;
  std::optional<Case> case_;
  Candidate best_;
};

}  // namespace

const Candidate& ClusterPlan::best() const {
  if (!fits()) throw std::runtime_error(reason);
  return candidates.front();
}

ClusterPlan plan_cluster(const Cluster& cluster, const std::vector<Profile>& profiles,
                         const ClusterPlanOptions& options) {
  check_plan(cluster, profiles, options);
  const int devices = cluster.devices();
  const int most_stages = StageCost(profiles.front()).most_stages();
  std::vector<Replicated> found;
  for (int replicas = 1; replicas <= devices; ++replicas) {
    const int workers = devices / replicas;
    if (devices % replicas != 0 || workers > most_stages) continue;
    const auto cases = cases_of(profiles, options, replicas, workers);
    if (cases.empty()) continue;
    auto schedulings = schedulings_of(options.schedule, workers, most_stages);
    if (schedulings.empty()) continue;
    Replicated replicated(cluster, replicas, std::move(schedulings));
    for (const auto& each : cases) replicated.offer(each);
    found.push_back(std::move(replicated));
  }
  if (found.empty()) {
    const auto append = [](std::string* text, const Profile& profile) { absl::StrAppend(text, profile.samples); };
    throw std::invalid_argument(StrFormat(
        "[suggest] no number of replicas suits %d devices and %d samples: it must divide both, leave at most %d "
        "devices "
        "per replica, one for each stage, and give each replica whole micro-batches of %s samples, at most %d cells "
        "(devices x micro-batches); change the samples or the profiles",
        devices, options.samples, most_stages, absl::StrJoin(profiles, " or ", append), kMostPlannedCells));
  }
  std::vector<std::pair<Candidate, std::string>> plans;
  for (auto& each : found) {
    auto suggestion = each.improve(kMostActions / static_cast<std::int64_t>(found.size()));
    plans.emplace_back(std::move(suggestion.candidates.front()), std::move(suggestion.reason));
  }
  std::stable_sort(plans.begin(), plans.end(),
                   [](const auto& a, const auto& b) { return is_better_plan(a.first, b.first); });
  ClusterPlan plan{.reason = plans.front().second};
  for (auto& [candidate, reason] : plans) plan.candidates.push_back(std::move(candidate));
  return plan;
}

}  // namespace gpipe
