#pragma once

#include <vector>

#include "gpipe/autograd/batch_statistics.h"
#include "gpipe/pipeline.h"

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

}  // namespace gpipe
