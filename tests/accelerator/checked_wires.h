#pragma once

#include <atomic>
#include <memory>

#include "gpipe/ranks.h"
#include "gpipe/ranks/device_wire.h"

namespace gpipe::accelerator {

/// Wires between the devices of ranks that are threads of this process, in place of NCCL's. A transfer reads or writes its
/// tensors on the current stream of its device. What is wrong is a violation of stream_order(): tensors that differ from
/// those that were sent, and a receive that is enqueued before its send.
class CheckedWires {
 public:
  CheckedWires();

  /// Makes the connections of one rank.
  ConnectDevices connect();

  /// How many ranks have aborted theirs. This lets held devices go on.
  int aborted() const;

 private:
  class Wire;
  class Connections;
  struct Network;
  const std::shared_ptr<Network> network_;
};

}  // namespace gpipe::accelerator
