#include "balance/network.h"

#include <algorithm>
#include <cmath>

#include "gpipe/base/checks.h"

namespace gpipe {

const LinkSpeed& Network::link(int a, int b) const {
  // The ranks of both workers lie between these two, and the ranks of some replica of either are these two.
  const std::int64_t first = std::int64_t{std::min(a, b)} * replicas;
  const std::int64_t last = std::int64_t{std::max(a, b)} * replicas + replicas - 1;
  return devices_per_host == 0 || first / devices_per_host == last / devices_per_host ? inside : between;
}

double Network::reduction(int worker, std::int64_t bytes) const {
  if (replicas == 1 || bytes == 0) return 0;
  const auto& link = this->link(worker, worker);
  return 2 * (link.latency + (replicas - 1.0) / replicas * link.sending(bytes));
}

void check(const Network& network) {
  if (network.replicas < 1) refuse_argument("replicas must be positive, but is ", network.replicas);
  if (network.devices_per_host < 0) {
    refuse_argument("devices_per_host must not be negative, but is ", network.devices_per_host);
  }
  for (const auto& [link, where] :
       {std::pair(network.inside, "inside a host"), std::pair(network.between, "between hosts")}) {
    if (!(link.bandwidth >= 0 && link.latency >= 0 && std::isfinite(link.latency))) {
      refuse_argument("bandwidth and latency ", where, " must not be negative, but are ", link.bandwidth,
                      " bytes/s and ", link.latency, " s");
    }
  }
}

}  // namespace gpipe
