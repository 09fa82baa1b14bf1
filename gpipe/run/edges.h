#pragma once

#include <ATen/core/Tensor.h>

#include "gpipe/ranks/transport.h"
#include "gpipe/run/step_input.h"

namespace gpipe {

/// The values of the parameters that stages of this rank borrow from other ranks, during one mini-batch. The layers
/// compute with a copy of each such parameter.
///
/// Thread safety: the workers of this rank call receive().
class BorrowedValues {
 public:
  /// Gives `copy`, in the first call of a mini-batch, the value, the version and requires_grad of the owner's parameter,
  /// which has come as `lent`. On the copy's device, the copy takes the place of the tensor in
  /// `lent`. Errors: std::runtime_error if their types or shapes differ.
  void receive(Parcel& lent, at::Tensor copy);

 private:
  Mutex mutex_;
  absl::flat_hash_map<const void*, StreamEvent> received_ ABSL_GUARDED_BY(mutex_);  // by copy: when it has its value
};

/// What the stages of one mini-batch exchange during one part of its program: parcels, and back their gradients.
///
/// Received tensors are on the device of the receiver's end (see Pipeline::ends). Copies run on the edge's copy
/// streams, after the sender's work.
///
/// Thread safety: the functions run on their worker's thread.
class Edges {
 public:
  /// `counter`, which may be null, learns when memory sent to another rank is freed. `inputs`: what the caller sends to
  /// the first stage. All must outlive this.
  Edges(Pipeline& pipeline, const Program& program, Part part, std::shared_ptr<ByteCounter> counter,
        CallerInputs& inputs);

  /// Returns what an action takes, in the order of Wiring::takes(); first the input for an F of the first stage. A
  /// parcel of gradients has only its tensors. Waits for other ranks. Errors: ConnectionError; std::runtime_error if a
  /// tensor was changed in place after it was sent.
  std::vector<Parcel> receive(const Action& action);
  /// Takes what an action puts, in the order of Wiring::puts(). Errors: ConnectionError.
  void send(const Action& action, std::vector<Parcel> parcels);
  /// Waits for an event of a worker's device: with transfers between devices of ranks, which a rank that has stopped would
  /// hold, for at most the time-out. Errors: ConnectionError.
  void await(int worker, const StreamEvent& event);
  /// After a worker's last action, waits for its transfers between devices of ranks, which also end when a rank has
  /// failed. Errors: ConnectionError.
  void settle(int worker);

 private:
  bool is_remote(int edge) const;
  /// The worker's wires between devices, by the rank at the other end: one for each.
  std::map<int, DeviceLink*> links_of(int worker);

  Pipeline& pipeline_;
  const Program& program_;
  CallerInputs& inputs_;
  Slots local_;
  std::optional<RemoteTransport> remote_;  // if there are other ranks
};

}  // namespace gpipe
