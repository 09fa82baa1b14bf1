#pragma once

#include "balance/network.h"
#include "gpipe/action.h"

namespace gpipe {

/// The order of a step's actions, and the workers of its stages.
struct Scheduling {
  /// The schedule of step(), as in GPipeOptions. Empty: forward() and its backward.
  std::string schedule = {};
  int stages_per_worker = 1;        ///< as in GPipeOptions
  std::vector<int> placement = {};  ///< as in GPipeOptions
  /// If not 0: a list schedule of this depth for the costs (see gpipe/schedule/list_schedule.h), whatever `schedule` is.
  double depth = 0;
};

/// How a partitioned model runs.
struct RunOptions {
  int chunks = 1;  ///< micro-batches of the profile's size
  Checkpoints checkpoint = Checkpoint::kExceptLast;
  Network network = {};  ///< the workers' devices. By default transfers take no time, as between CPU stages
  /// Parcels are copied to the receiver's device, as between GPUs. Otherwise the receiver uses the sender's memory.
  bool copies = false;
  Scheduling scheduling = {};
};

}  // namespace gpipe
