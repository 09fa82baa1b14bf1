#pragma once

namespace gpipe {

/// The places of a job's ranks: equal pipelines, its *replicas*, of as many ranks each. A rank has a position in its
/// replica. Ranks of one position have the same stages and successive numbers, so that they share a host where they
/// fit.
struct Mesh {
  int positions = 1;
  int replicas = 1;

  int position_of(int rank) const { return rank / replicas; }
  int replica_of(int rank) const { return rank % replicas; }
  int rank_at(int position, int replica) const { return position * replicas + replica; }
};

}  // namespace gpipe
