#pragma once

#include <torch/types.h>

#include "gpipe/options.h"
#include "gpipe/schedule_source.h"

namespace gpipe {

/// The workers of a pipeline: their stages, their devices, and where their schedules come from.
struct Workers {
  ScheduleSource schedules;
  /// Per worker; an accelerator without an index is its first device. The CPU for workers of other ranks.
  std::vector<torch::Device> devices;
  std::vector<int> ranks;  ///< per worker; 0 without Ranks
  int rank = 0;            ///< this one
  bool has_wires = false;  ///< whether tensors go from device to device between ranks, not through the hosts

  bool is_here(int worker) const { return ranks[worker] == rank; }
};

/// Arranges the workers for a model of `stages` stages as the options say. Bindings call it before they move a model.
///
/// Errors: std::invalid_argument for a schedule that does not exist or fit, options that contradict each other or the
/// stages; std::out_of_range for too few devices, or one that does not exist.
Workers arrange_workers(const GPipeOptions& options, std::size_t stages);

}  // namespace gpipe
