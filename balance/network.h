#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "gpipe/api.h"

namespace gpipe {

/// How fast one device sends to another.
struct LinkSpeed {
  double bandwidth = 0;  ///< bytes per second; 0: transfers take no time
  double latency = 0;    ///< seconds, added to each transfer

  /// Seconds during which a transfer keeps the link busy.
  double sending(std::int64_t bytes) const { return bandwidth > 0 ? static_cast<double>(bytes) / bandwidth : 0; }
  /// Seconds until a transfer has arrived.
  double seconds(std::int64_t bytes) const { return latency + sending(bytes); }
};

/// The devices of equal replicas of a pipeline, each with the same workers. Worker w of replica r is on device
/// w * replicas + r, and each host has the next devices_per_host devices. So replicas of a worker are neighbours.
struct GPIPE_API Network {
  int replicas = 1;
  int devices_per_host = 0;  ///< 0: all devices are on one host
  LinkSpeed inside = {};     ///< between two devices of a host
  LinkSpeed between = {};    ///< between two devices of different hosts

  /// The link between two workers of a replica: `inside` if it is so in every replica. With a == b, the link between
  /// the replicas of a worker.
  const LinkSpeed& link(int a, int b) const;

  /// Seconds to sum `bytes` of gradients over a worker's replicas: each sends all others their shares, then its sums.
  double reduction(int worker, std::int64_t bytes) const;
};

/// Errors: std::invalid_argument for a number of replicas that is not positive, and for negative or NaN numbers.
GPIPE_API void check(const Network& network);

}  // namespace gpipe
