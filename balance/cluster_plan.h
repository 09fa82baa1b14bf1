#pragma once

#include "balance/cluster.h"
#include "balance/search.h"
#include "gpipe/api.h"

namespace gpipe {

struct ClusterPlanOptions {
  std::int64_t samples = 1;  ///< of the mini-batch, which all replicas share equally
  std::vector<Checkpoint> checkpoints = {Checkpoint::kNever, Checkpoint::kExceptLast, Checkpoint::kAlways};
  /// A schedule of step(), in each placement that fits; kAnySchedule for all; empty for forward() and its backward.
  std::string schedule = kAnySchedule;
};

/// Ways to train a model on all devices of a cluster: the best for each number of replicas.
using ClusterPlan = Candidates;

/// The most cells (stages x micro-batches) of a pipeline that a plan tries.
inline constexpr std::int64_t kMostPlannedCells = 1 << 13;

/// Chooses the number of replicas, which divides the number of devices, and for each replica the schedule, placement,
/// balance, checkpoint mode and number of micro-batches. Each profile is of micro-batches of another size, on a device
/// of the cluster; so a replica's share of the mini-batch gives the number of micro-batches. Recomputes only what does
/// not fit otherwise, and searches little where a step takes more than twice the fastest. Takes seconds for a thousand
/// devices. Deterministic. Errors: std::invalid_argument for invalid options or an invalid cluster, no profiles,
/// profiles of different models, and if no number of replicas suits the devices, the samples and the layers.
GPIPE_API ClusterPlan plan_cluster(const Cluster& cluster, const std::vector<Profile>& profiles,
                                   const ClusterPlanOptions& options);

}  // namespace gpipe
