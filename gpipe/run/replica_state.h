#pragma once

#include <string>
#include <vector>

#include "gpipe/autograd/batch_statistics.h"
#include "gpipe/run/pipeline.h"

namespace gpipe {

/// Gives the parameters and buffers of this rank's stages the values that they have in the first replica. Called by all ranks
/// with the same stages when a pipeline is made.
void take_state_of_first_replica(Pipeline& pipeline);

/// Gives the buffers of this rank's stages the values that they have in the first replica. All ranks with the same stages call
/// it within a call. Leaves large buffers alone that are known to be constant. Does not advance version counters.
void take_buffers_of_first_replica(Pipeline& pipeline);

/// Adds to the statistics of each of this rank's stages those of the other replicas, in their order. All ranks with the same
/// stages call it within a call.
void merge_over_replicas(std::vector<BatchStatistics>& statistics, Pipeline& pipeline);

/// Returns the sum of the replicas' parts of a loss, in their order, on all of them. The part of a replica without samples
/// is undefined. The ranks with the last stage call it within a call.
at::Tensor sum_over_replicas(const at::Tensor& part, Pipeline& pipeline);

/// Says which of this rank's parameters get gradients, and hashes their values. Counterparts must say the same. `stages`: the
/// sinks of each.
std::string describe_trained(const std::vector<ParameterSinks>& stages);

}  // namespace gpipe
