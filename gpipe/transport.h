#pragma once

#include <vector>

#include "gpipe/autograd/parcel.h"
#include "gpipe/pipeline.h"
#include "gpipe/runtime/transfer.h"

namespace gpipe {

/// Carries the parcels and gradients of one mini-batch from stage to stage, and its inputs from the caller to stage 0.
/// There is one slot per edge, direction and micro-batch. What is received lies on the receiver's device; copies run on
/// the edge's copy streams, behind the sender's work.
///
/// Thread safety: each function runs on the worker of the stage that it serves. Slots need no lock, because the
/// executor orders each edge's put before its take.
class Transport {
 public:
  /// `inputs` holds one parcel per micro-batch.
  Transport(Pipeline& pipeline, std::vector<Parcel> inputs);

  /// Marks the inputs as complete behind the work that the calling thread has enqueued on their devices.
  void admit_inputs();
  Parcel receive_input(int micro_batch);

  void send(int edge, int micro_batch, Parcel parcel);
  /// Errors: std::runtime_error when a tensor was changed in place after it was sent.
  Parcel receive(int edge, int micro_batch);

  void send_gradients(int edge, int micro_batch, Gradients gradients);
  Gradients receive_gradients(int edge, int micro_batch);

 private:
  template <typename T>
  struct Slot {
    T content;
    StreamEvent ready;
  };

  std::size_t slot(int edge, int micro_batch) const { return edge * inputs_.size() + micro_batch; }
  c10::Device device(int stage) const { return pipeline_.stages()[stage].device; }

  Pipeline& pipeline_;
  std::vector<Parcel> inputs_;             // per micro-batch
  std::vector<StreamEvent> inputs_ready_;  // per input tensor
  std::vector<Link> input_links_;          // per input tensor
  std::vector<Slot<Parcel>> parcels_;
  std::vector<Slot<Gradients>> gradients_;
};

}  // namespace gpipe
