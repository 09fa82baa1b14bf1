#pragma once

#include <memory>
#include <vector>

#include "gpipe/ranks/exchange.h"
#include "gpipe/ranks/parcel_message.h"
#include "gpipe/runtime/byte_counter.h"
#include "gpipe/transport.h"

namespace gpipe {

/// The parcels and gradients of a mini-batch's edges, as its Exchange moves them between a Transport and the wires. Tensors
/// go by the wires between devices, if the pipeline has them.
class ParcelEdges : public EdgeContents {
 public:
  /// The arguments must outlive this. `counter` learns when memory that was sent is freed; it may be null.
  ParcelEdges(Pipeline& pipeline, Transport& transport, const std::shared_ptr<ByteCounter>& counter)
      : pipeline_(pipeline), transport_(transport), counter_(counter) {}

  Outgoing take_off(const Action& action, const std::vector<int>& edges) override;
  void put_on(const Action& action, const std::vector<int>& edges, std::unique_ptr<Incoming> message) override;
  void settle(int from, int to) override;

 private:
  /// The link of what an action puts on an edge; null if that passes through the host.
  DeviceLink* link(const Action& action, int edge) const;

  Pipeline& pipeline_;
  Transport& transport_;
  const std::shared_ptr<ByteCounter>& counter_;
};

}  // namespace gpipe
