#pragma once

#include <span>
#include <vector>

#include "gpipe/autograd/parcel.h"
#include "gpipe/pipeline.h"
#include "gpipe/runtime/transfer.h"

namespace gpipe {

/// Carries the parcels and gradients of one mini-batch from stage to stage. There is one slot per edge, direction and
/// micro-batch. Received tensors are on the device of the receiver's end (see Pipeline::ends). Copies run on the edge's copy
/// streams, after the sender's work. Stages of one worker share its device and stream, so nothing is copied or waited for
/// between them.
///
/// Thread safety: each function runs on the worker of the stage that it serves. Slots need no lock, because the
/// executor orders each edge's put before its take.
class Transport {
 public:
  /// `pipeline` must outlive this.
  Transport(const Pipeline& pipeline, int micro_batches);

  void send(int edge, int micro_batch, Parcel parcel);
  /// The same for a parcel that is there after the events.
  void send(int edge, int micro_batch, Parcel parcel, StreamEvents ready);
  /// Errors: std::runtime_error when a tensor was changed in place after it was sent.
  Parcel receive(int edge, int micro_batch);

  void send_gradients(int edge, int micro_batch, Gradients gradients);
  void send_gradients(int edge, int micro_batch, Gradients gradients, StreamEvents ready);
  Gradients receive_gradients(int edge, int micro_batch);

 private:
  template <typename T>
  struct Slot {
    T content;
    StreamEvents ready;
  };

  std::size_t slot(int edge, int micro_batch) const { return edge * micro_batches_ + micro_batch; }
  StreamEvents ready(int edge, c10::Device device, std::span<const at::Tensor> tensors) const;

  const Pipeline& pipeline_;
  const std::size_t micro_batches_;
  std::vector<Slot<Parcel>> parcels_;
  std::vector<Slot<Gradients>> gradients_;
};

}  // namespace gpipe
