#pragma once

#include <memory>
#include <vector>

#include "gpipe/ranks/exchange.h"
#include "gpipe/ranks/parcel_message.h"
#include "gpipe/runtime/byte_counter.h"
#include "gpipe/transport.h"

namespace gpipe {

/// The parcels and gradients of a mini-batch's edges, as its Exchange moves them between a Transport and the wires.
class ParcelEdges : public EdgeContents {
 public:
  /// The arguments must outlive this. `counter` learns when memory that was sent is freed; it may be null.
  ParcelEdges(Transport& transport, int rank, const StructureCodec& codec, const std::shared_ptr<ByteCounter>& counter)
      : transport_(transport), rank_(rank), codec_(codec), counter_(counter) {}

  Outgoing take_off(const Action& action, const std::vector<int>& edges) override;
  void put_on(const Action& action, const std::vector<int>& edges, std::unique_ptr<Incoming> message) override;

 private:
  Transport& transport_;
  const int rank_;
  const StructureCodec& codec_;
  const std::shared_ptr<ByteCounter>& counter_;
};

}  // namespace gpipe
