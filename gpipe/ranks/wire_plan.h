#pragma once

#include <cstdint>
#include <vector>

#include "gpipe/schedule/program.h"

namespace gpipe {

/// What an action puts for one worker of another rank.
struct WireMessage {
  Action action;
  std::vector<int> edges;  ///< ascending

  /// Identifies the action among those of a program.
  std::uint64_t label() const;
};

/// The messages from one worker to another during a part of a program, in the order of the sender's actions. Both ends
/// compute it, so a message needs no address.
struct WirePlan {
  int from = 0;
  int to = 0;
  std::vector<WireMessage> messages;
};

/// Returns the rank of each worker: contiguous blocks, as equal as possible. REQUIRES: 1 <= ranks <= workers.
std::vector<int> ranks_of_workers(int workers, int ranks);

/// Returns the wires between workers of different ranks that a part of the program uses, ordered by (from, to).
std::vector<WirePlan> plan_wires(const Program& program, Part part, const std::vector<int>& ranks);

}  // namespace gpipe
