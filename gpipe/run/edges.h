#pragma once

#include <ATen/core/Tensor.h>

#include "gpipe/ranks/remote_edges.h"
#include "gpipe/run/step_input.h"

namespace gpipe {

/// The values of the parameters that stages of this rank borrow from other ranks, during one mini-batch. The layers
/// compute with a copy of each such parameter.
///
/// Thread safety: the workers of this rank call receive().
class BorrowedValues {
 public:
  /// Gives `copy`, in the first call of a mini-batch, the value and requires_grad of the owner's parameter, which has
  /// come as `lent`, and a new version if it changes. On the copy's device, the copy takes the place of the tensor in
  /// `lent`. Errors: std::runtime_error if their types or shapes differ.
  void receive(Parcel& lent, at::Tensor copy);

 private:
  Mutex mutex_;
  absl::flat_hash_map<const void*, StreamEvent> received_ ABSL_GUARDED_BY(mutex_);  // by copy: when it has its value
};

/// What the stages of one mini-batch exchange during one part of its program: parcels, and back their gradients. There
/// is a slot per edge, direction and micro-batch. A message of another rank fills the slots of remote edges.
///
/// Received tensors are on the device of the receiver's end (see Pipeline::ends). Copies run on the edge's copy
/// streams, after the sender's work.
///
/// Thread safety: receive(), send() and settle() run on their worker's thread. Slots need no lock, because the executor
/// orders each edge's put before its take. activity(): any thread.
class Edges {
 public:
  /// `counter`, which may be null, learns when memory sent to another rank is freed. `inputs`: what the caller sends to
  /// the first stage. All but `key` must outlive this.
  Edges(Pipeline& pipeline, const Program& program, Part part, const LayoutKey& key,
        std::shared_ptr<ByteCounter> counter, CallerInputs& inputs);
  ~Edges();
  Edges(const Edges&) = delete;

  /// Returns what an action takes, in the order of Wiring::takes(); first the input for an F of the first stage. A
  /// parcel of gradients has only its tensors. Waits for other ranks. Errors: ConnectionError; std::runtime_error if a
  /// tensor was changed in place after it was sent.
  std::vector<Parcel> receive(const Action& action);
  /// Takes what an action puts, in the order of Wiring::puts(). Errors: ConnectionError.
  void send(const Action& action, std::vector<Parcel> parcels);
  /// After a worker's last action, waits for its transfers between devices of ranks. Errors: ConnectionError.
  void settle(int worker);

  /// What a worker does. REQUIRES: there are other ranks.
  Activity activity(int worker) const { return remote_->activity(worker); }

 private:
  struct Slot {
    Parcel parcel;
    StreamEvents ready;
  };
  Slot& slot(int edge, const Action& action);
  Parcel take(int edge, const Action& action);
  Outgoing to_message(const WireMessage& message);
  void take_message(const WireMessage& message, std::unique_ptr<Incoming> incoming);
  DeviceLink* device_link(const WireMessage& message) const;

  Pipeline& pipeline_;
  const Program& program_;
  const std::shared_ptr<ByteCounter> counter_;
  CallerInputs& inputs_;
  std::vector<Slot> slots_;
  std::optional<RemoteEdges> remote_;  // if there are other ranks
};

}  // namespace gpipe
