// A training over ranks that are threads of this process.
#pragma once

#include "gpipe/ranks.h"
#include "gpipe/ranks/device_wire.h"
#include "tests/gpipe/helpers.h"

namespace gpipe {
namespace accelerator {

/// Wires between the devices of ranks that are threads of this process, in place of NCCL's. A transfer reads or writes
/// its tensors on the current stream of its device. What is wrong is a violation of stream_order(): tensors that differ
/// from those that were sent, and a receive that is enqueued before its send.
class CheckedWires {
 public:
  CheckedWires();

  /// Makes the connections of one rank.
  ConnectDevices connect();

  /// How many ranks have aborted theirs. This lets held devices go on.
  int aborted() const;

 private:
  class Wire;
  struct Network;
  const std::shared_ptr<Network> network_;
};

}  // namespace accelerator

/// The losses, the output and the gradients, on the CPU.
using Results = std::vector<Tensor>;

/// How tensors get from one rank to another.
enum class Way { kHost, kWires };

/// Calls `run` for each rank of a job on a thread of its own. The errors' texts, by rank; empty if there was none.
/// The rank `without_wires` gets none.
std::vector<std::string> run_ranks(int size, const RanksOptions& options, accelerator::CheckedWires* wires,
                                   const std::function<void(const std::shared_ptr<Ranks>&)>& run,
                                   int without_wires = -1);

/// Options with time-outs that are long enough for a busy machine.
RanksOptions patient_ranks();

/// Steps, a forward, a backward and an evaluation on two workers, with skips. After some calls, the caller changes the
/// input in place and the optimizer the parameters. `ranks` may be null.
Results train(const std::string& schedule, Checkpoint checkpoint, const std::vector<torch::Device>& devices,
              const std::shared_ptr<Ranks>& ranks);

/// The same by two ranks with a device each. Returns the results of each rank.
std::vector<Results> train_over_ranks(const std::string& schedule, Checkpoint checkpoint, Way way);

}  // namespace gpipe
