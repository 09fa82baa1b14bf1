#pragma once

#include <deque>

#include "gpipe/program.h"
#include "gpipe/ranks/connections.h"
#include "gpipe/ranks/device_wire.h"
#include "gpipe/tensors/byte_counter.h"
#include "gpipe/tensors/parcel.h"

namespace gpipe {

class Team;

/// Makes a message of parcels of this rank. Tensors arrive with their bits, strides and addresses modulo 64 bytes. Of
/// tensors that are not on the CPU it has only layouts: adds their elements to `on_device`, for a DeviceLink.
/// REQUIRES: all tensors are on the CPU or `meta`, or `on_device` is not null. Errors: std::invalid_argument unless sizes
/// and strides tell all about a tensor.
Outgoing to_message(const std::vector<Parcel>& parcels, int rank, const StructureCodec& codec,
                    std::vector<at::Tensor>* on_device = nullptr);

/// Makes memory for parcels. Errors: std::runtime_error for a layout that is malformed, or too large for this host.
std::unique_ptr<Incoming> allocate_parcels(const std::string& layout);

/// Returns the parcels of a message from allocate_parcels(), with meta tensors in the place of tensors on devices.
/// Errors: std::runtime_error for a message without parcels.
std::vector<Parcel> to_parcels(Received message, const StructureCodec& codec);

/// Receives tensors, also ones whose memory has gaps.
class Landing {
 public:
  /// Adds a tensor that will get its values.
  void add(const at::Tensor& tensor);
  /// The memory without gaps into which to receive, one tensor per add().
  const std::vector<at::Tensor>& received() const { return received_; }
  /// Gives the tensors with gaps their values. Call when all have been received, on the stream that has.
  void scatter();

 private:
  std::vector<at::Tensor> received_;
  std::vector<std::pair<at::Tensor, at::Tensor>> with_gaps_;  // to and from
};

/// Parcels by edge, direction and micro-batch, from the actions that put them to those that take them. It needs no lock,
/// because the executor orders each put before its take.
class Slots {
 public:
  /// A parcel, and when it can be used.
  struct Item {
    Parcel parcel;
    StreamEvents ready = {};
  };
  explicit Slots(const Program& program)
      : micro_batches_(program.layout().micro_batches), items_(2 * program.edges().size() * micro_batches_) {}

  void put(int edge, const Action& action, Item item) { slot(edge, action) = std::move(item); }
  Item take(int edge, const Action& action) { return std::exchange(slot(edge, action), {}).value(); }
  bool has(int edge, const Action& action) { return slot(edge, action).has_value(); }

 private:
  std::optional<Item>& slot(int edge, const Action& action) {
    const int direction = action.kind == Kind::F ? 0 : 1;
    return items_[(edge * 2 + direction) * micro_batches_ + action.micro_batch];
  }
  const int micro_batches_;
  std::vector<std::optional<Item>> items_;
};

/// Takes parcels to and from other ranks. Between devices, each worker sends and receives in one order for all, because a
/// device that runs few transfers at once could deadlock in another.
///
/// Thread safety: an action's functions run on its worker's thread.
class RemoteTransport {
 public:
  /// Returns this rank's end of the wire between the devices of two workers; null if there is none.
  using FindLink = std::function<DeviceLink*(int from, int to)>;
  /// `counter`, which may be null, learns when memory sent to another rank is freed. The others must outlive this.
  RemoteTransport(Team& team, const Program& program, Part part, FindLink link, std::shared_ptr<ByteCounter> counter);

  /// Takes what an action puts on an edge. REQUIRES: it can be used on the current stream. Errors: ConnectionError.
  void put(int edge, const Action& action, Parcel parcel);
  /// Returns what an action takes from an edge. Waits for the other rank. Errors: ConnectionError.
  Slots::Item take(int edge, const Action& action);

 private:
  /// What an action puts for one other worker. It travels as one message.
  struct Message {
    Action action;
    int from = 0;
    int to = 0;
  };
  static std::vector<Message> messages_of(const Program& program, Part part);
  void receive(int from, int to);

  Team& team_;
  const Program& program_;
  const FindLink link_;
  const std::shared_ptr<ByteCounter> counter_;
  Slots slots_;
  std::vector<std::deque<Message>> left_;  // per worker of this rank, with wires between devices: in order
};

}  // namespace gpipe
