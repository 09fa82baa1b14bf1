#pragma once

#include <vector>

#include "gpipe/run/pipeline.h"
#include "gpipe/tensors/parcel.h"
#include "gpipe/tensors/transfer.h"

namespace gpipe {

/// Copies tensors of the caller to the device of a stage: the inputs to the first stage, the targets to the last.
class CallerInputs {
 public:
  /// Takes one parcel per micro-batch. Reads their tensors after the work that the calling thread's current streams have
  /// enqueued on their devices.
  CallerInputs(Pipeline& pipeline, std::vector<Parcel> parcels, c10::Device device);

  /// Returns a micro-batch's parcel, once. Call on the stage's worker.
  Parcel receive(int micro_batch);

 private:
  const c10::Device device_;
  std::vector<Parcel> parcels_;
  std::vector<StreamEvents> ready_;  // per tensor of a parcel
  std::vector<Link> links_;          // per tensor of a parcel
};

}  // namespace gpipe
