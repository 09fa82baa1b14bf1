#pragma once

#include <cstdint>
#include <vector>

namespace gpipe {

/// The places of a job's ranks: equal pipelines, its *replicas*, of as many ranks each. Ranks of one position in their
/// replicas have the same stages and successive numbers, so that they share a host where they fit.
struct Mesh {
  int positions = 1;
  int replicas = 1;

  int position_of(int rank) const { return rank / replicas; }
  int replica_of(int rank) const { return rank % replicas; }
  int rank_at(int position, int replica) const { return position * replicas + replica; }

  /// Returns the rank of each worker of a replica: contiguous blocks, as equal as possible. REQUIRES: positions <=
  /// workers.
  std::vector<int> ranks_of_workers(int workers, int replica) const {
    std::vector<int> ranks;
    for (std::int64_t w = 0; w < workers; ++w)
      ranks.push_back(rank_at(static_cast<int>(w * positions / workers), replica));
    return ranks;
  }
};

}  // namespace gpipe
