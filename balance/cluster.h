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

/// Hosts of equal devices.
struct Cluster {
  int hosts = 1;
  int devices_per_host = 1;
  std::int64_t memory = 0;  ///< bytes per device; 0: no limit
  LinkSpeed inside = {};    ///< between two devices of a host
  /// Between two devices of different hosts. If the devices of a host share a network card, a device's share of it.
  LinkSpeed between = {};

  int devices() const { return hosts * devices_per_host; }
  /// The devices as replicas of a pipeline.
  Network network(int replicas) const { return {replicas, devices_per_host, inside, between}; }
};

/// The most devices of a cluster.
inline constexpr int kMostDevices = 1 << 20;
/// The longest text that cluster_from_json() accepts, in bytes.
inline constexpr std::size_t kMaxClusterJson = std::size_t{1} << 16;

/// Reads a cluster from JSON: an object with the names of Cluster's members, each link an object with "bandwidth" and
/// "latency". Every member is required, and no other name is allowed. Errors: std::invalid_argument with the reason and
/// the place, e.g. "/inside/latency"; numbers out of range are errors, and so is a bandwidth of 0.
GPIPE_API Cluster cluster_from_json(const std::string& text);

}  // namespace gpipe
