#pragma once

#include "gpipe/ranks/connections.h"

namespace gpipe {

/// A text that all ranks can read, such as in a store. It replaces the one before.
struct Board {
  std::function<void(const std::string& text)> write;
  std::function<std::string()> read;  ///< empty: there is none yet
};

/// Connects this rank to each other one. Rank 0 leaves its address and a secret on the board, the others call it, and
/// it tells them where the others listen. Returns a name that is the same on all ranks, and unique.
///
/// What connects to the listener must say the secret before all else, and soon. Others are closed, the oldest ones if
/// there are many. The board may have an address of an earlier job, whose rank 0 has stopped to listen. If no others
/// come in time, rank 0 leaves the reason there.
///
/// `join_timeout`: until all ranks have called rank 0. `timeout`: from then on. Errors: ConnectionError, also for ranks
/// that do not come in time, with their numbers; what `poll` and the board throw.
std::string connect_ranks(Connections& connections, int rank, int size, Socket listener, const Board& board,
                          std::chrono::milliseconds join_timeout, std::chrono::milliseconds timeout, const Poll& poll);

}  // namespace gpipe
