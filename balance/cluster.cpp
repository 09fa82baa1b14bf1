#include "balance/cluster.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "absl/strings/str_format.h"

namespace gpipe {
namespace {

void check_link(const LinkSpeed& link, const char* where) {
  if (link.bandwidth >= 0 && link.latency >= 0 && std::isfinite(link.latency)) return;
  throw std::invalid_argument(
      absl::StrFormat("[balance] bandwidth and latency %s must not be negative, but are %g bytes/s and %g s", where,
                      link.bandwidth, link.latency));
}

}  // namespace

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
  if (network.replicas < 1) {
    throw std::invalid_argument(absl::StrFormat("[balance] replicas must be positive, but is %d", network.replicas));
  }
  if (network.devices_per_host < 0) {
    throw std::invalid_argument(
        absl::StrFormat("[balance] devices_per_host must not be negative, but is %d", network.devices_per_host));
  }
  check_link(network.inside, "inside a host");
  check_link(network.between, "between hosts");
}

}  // namespace gpipe
