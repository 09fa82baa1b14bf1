#include "balance/cluster_plan.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_join.h"
#include "balance/stage_cost.h"
#include "gpipe/base/checks.h"
#include "gpipe/schedules.h"

namespace gpipe {

const LinkSpeed& Network::link(int a, int b) const {
  // The ranks of both workers lie between these two, and the ranks of some replica of either are these two.
  const std::int64_t first = std::int64_t{std::min(a, b)} * replicas;
  const std::int64_t last = std::int64_t{std::max(a, b)} * replicas + replicas - 1;
  return devices_per_host == 0 || first / devices_per_host == last / devices_per_host ? inside : between;
}

double Network::reduction(int worker, std::int64_t bytes) const {
  if (replicas == 1 || bytes == 0) return 0;
  const auto& link = this->link(worker, worker);
  return 2 * (link.latency + (replicas - 1.0) / replicas * link.sending(bytes));
}

void check(const Network& network) {
  if (network.replicas < 1) refuse_argument("replicas must be positive, but is ", network.replicas);
  if (network.devices_per_host < 0) {
    refuse_argument("devices_per_host must not be negative, but is ", network.devices_per_host);
  }
  for (const auto& [link, where] :
       {std::pair(network.inside, "inside a host"), std::pair(network.between, "between hosts")}) {
    if (!(link.bandwidth >= 0 && link.latency >= 0 && std::isfinite(link.latency))) {
      refuse_argument("bandwidth and latency ", where, " must not be negative, but are ", link.bandwidth,
                      " bytes/s and ", link.latency, " s");
    }
  }
}

namespace {

/// Most actions that are simulated to move cuts, for all numbers of replicas together.
constexpr std::int64_t kMostActions = 1'000'000;

/// A profile, and the number of its micro-batches in a replica's share of the mini-batch.
struct Share {
  const Profile* profile;
  int chunks;
};

/// What is searched for one number of replicas.
struct Case {
  ChunkedProfile profile;
  SearchOptions options;
  Candidate best = {};
};

/// The time of a step if no worker ever waited.
double least_seconds(const Share& share, Checkpoint checkpoint, int workers) {
  double once = 0;
  double again = 0;  // more for a micro-batch that is recomputed
  for (const auto& layer : share.profile->layers) {
    once += layer.forward + std::min(layer.backward, layer.input_gradient + layer.weight_gradient);
    again += layer.stored + layer.recompute - layer.forward;
  }
  return (share.chunks * once + checkpoint.recomputed(share.chunks) * again) / workers;
}

/// Returns the ways to cut a replica's share into micro-batches, those that fill and drain fastest first.
std::vector<Share> shares_of(const std::vector<Profile>& profiles, std::int64_t samples, int replicas, int workers) {
  std::vector<Share> shares;
  for (const auto& profile : profiles) {
    if (samples % replicas != 0 || samples / replicas % profile.samples != 0) continue;
    const auto chunks = samples / replicas / profile.samples;
    if (chunks <= kMostPlannedCells / workers) shares.push_back({&profile, static_cast<int>(chunks)});
  }
  std::ranges::stable_sort(shares, {}, [&](const Share& share) {
    return least_seconds(share, Checkpoint::kNever, workers) * (share.chunks + workers - 1) / share.chunks;
  });
  return shares;
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
  const auto& [hosts, per_host, memory, inside, between] = cluster;
  if (hosts < 1 || per_host < 1 || hosts > kMostDevices / per_host) {
    refuse_argument("a cluster has 1 to ", kMostDevices, " devices, but got ", hosts, " hosts of ", per_host,
                    " devices");
  }
  check(cluster.network(1));
  if (memory < 0) refuse_argument("memory must not be negative, but is ", memory);
  if (profiles.empty()) refuse_argument("give at least one profile");
  if (options.checkpoints.empty()) refuse_argument("give at least one checkpoint mode");
  if (options.samples < 1) refuse_argument("samples must be positive, but is ", options.samples);
  if (!options.schedule.empty() && options.schedule != kAnySchedule) schedule_rule(options.schedule);
  for (const auto& profile : profiles) {
    if (profile.samples < 1) refuse_argument("a profile must have at least one sample, but has ", profile.samples);
    if (profile.layers.size() != profiles.front().layers.size()) {
      refuse_argument("profiles have ", profiles.front().layers.size(), " and ", profile.layers.size(),
                      " layers; give profiles of one model");
    }
  }
}

/// Whether the parameters and gradients alone have more bytes than the workers have memory.
bool is_too_large(const Profile& profile, std::int64_t memory, int workers) {
  const StageCost cost(profile);
  return memory > 0 && (cost.static_bytes(0, cost.layers()) + cost.gradients(0, cost.layers())) / workers > memory;
}

/// Returns the best case for a number of replicas; nothing if there is none. A schedule that fits without recomputing,
/// or with less of it, is not tried with more. Tries no further share if the best takes more than `most_seconds`.
std::optional<Case> best_case(const Cluster& cluster, std::vector<Share> shares, std::vector<Checkpoint> modes,
                              const std::vector<Scheduling>& schedulings, int replicas, int workers,
                              double most_seconds) {
  std::optional<Case> best;
  if (shares.empty()) return best;
  if (is_too_large(*shares.front().profile, cluster.memory, workers)) {  // only say so
    shares = {*std::ranges::min_element(shares, {}, [](const Share& share) { return share.profile->samples; })};
    modes = {modes.back()};
  }
  for (const auto& share : shares) {
    if (best && best->best.fits && best->best.seconds > most_seconds) break;
    auto left = schedulings;
    for (const auto mode : modes) {
      if (left.empty() || (best && best->best.fits && least_seconds(share, mode, workers) >= best->best.seconds)) break;
      Case next{{share.chunks, *share.profile},
                {.checkpoints = {mode},
                 .memory_limit = cluster.memory,
                 .network = cluster.network(replicas),
                 .copies = true,
                 .schedulings = left,
                 .most_actions = 0}};
      const auto candidates = search({next.profile}, next.options).candidates;
      for (const auto& candidate : candidates) {
        std::erase_if(left, [&](const Scheduling& each) {
          return candidate.fits && each.schedule == candidate.schedule && each.placement == candidate.placement;
        });
      }
      next.best = candidates.front();
      if (!best || is_better(next.best, best->best)) best = std::move(next);
    }
  }
  return best;
}

}  // namespace

ClusterPlan plan_cluster(const Cluster& cluster, const std::vector<Profile>& profiles,
                         const ClusterPlanOptions& options) {
  check_plan(cluster, profiles, options);
  auto modes = options.checkpoints;
  std::ranges::sort(modes);
  const int devices = cluster.devices();
  const int most_stages = StageCost(profiles.front()).most_stages();
  std::vector<Case> cases;
  double fastest = std::numeric_limits<double>::infinity();
  for (int replicas = devices; replicas >= 1; --replicas) {
    const int workers = devices / replicas;
    if (devices % replicas != 0 || workers > most_stages) continue;
    auto best = best_case(cluster, shares_of(profiles, options.samples, replicas, workers), modes,
                          schedulings_of(options.schedule, workers, most_stages), replicas, workers, 2 * fastest);
    if (!best) continue;
    if (best->best.fits) fastest = std::min(fastest, best->best.seconds);
    cases.push_back(*std::move(best));
  }
  if (cases.empty()) {
    const auto append = [](std::string* text, const Profile& profile) { absl::StrAppend(text, profile.samples); };
    refuse_argument("no number of replicas suits ", devices, " devices and ", options.samples,
                    " samples: it must divide both, leave at most ", most_stages,
                    " devices per replica, one for each stage, and give each replica whole micro-batches of ",
                    absl::StrJoin(profiles, " or ", append), " samples, at most ", kMostPlannedCells,
                    " cells (devices x micro-batches); change the samples or the profiles");
  }
  std::vector<std::pair<Candidate, std::string>> plans;
  for (auto& [profile, search_options, best] : cases) {
    search_options.most_actions = kMostActions / static_cast<std::int64_t>(cases.size());
    auto suggestion = search({std::move(profile)}, search_options);
    plans.emplace_back(std::move(suggestion.candidates.front()), std::move(suggestion.reason));
  }
  std::ranges::stable_sort(plans, [](const auto& a, const auto& b) { return is_better(a.first, b.first); });
  ClusterPlan plan{.reason = plans.front().second};
  for (auto& [candidate, reason] : plans) plan.candidates.push_back(std::move(candidate));
  return plan;
}

}  // namespace gpipe
