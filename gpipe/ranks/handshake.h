#pragma once

#include <vector>

#include "gpipe/ranks/connections.h"

namespace gpipe {

/// A rank has ended while the ranks connect.
class RankLost : public ConnectionError {
 public:
  explicit RankLost(int rank) : ConnectionError("another rank was lost"), rank(rank) {}
  const int rank;
};

/// What a rank must know to connect to the others. `secret`: random bytes that only the job's ranks have.
struct JobAddresses {
  int rank;
  std::string secret;
  std::vector<Endpoint> endpoints;  ///< by rank; the own one is that of the listener
};

/// Returns random bytes.
std::string make_secret();

/// Connects each rank to each other one. Returns a socket per rank, with none for the own one. Closes the listener.
///
/// What connects to the listener must say the secret before all else, and soon. Others are closed, the oldest ones if
/// there are many. Errors: RankLost; ConnectionError, also for ranks that have not connected within `limit`, with their
/// numbers; those of `poll`. Calls `report` with a ConnectionError before it closes any socket, which the
/// other ranks take for the end of this one.
std::vector<Socket> connect_ranks(Socket listener, const JobAddresses& job, std::chrono::milliseconds limit,
                                  const Poll& poll,
                                  const std::function<void(const ConnectionError&)>& report = nullptr);

}  // namespace gpipe
