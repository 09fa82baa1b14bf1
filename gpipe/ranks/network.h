#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <vector>

#include "gpipe/ranks.h"
#include "gpipe/ranks/connections.h"

namespace gpipe {

/// Returns the address of this host from which packets to `host` leave. Errors: std::runtime_error if there is none.
std::string local_address_towards(const std::string& host);

/// Returns a socket that listens at an address of this host, and nowhere else. The caller owns it. Errors:
/// std::runtime_error for an address that is not this host's, or a port that is taken.
int listen_at(const std::string& host, int port);

/// Connects the ranks of a job by c10d's Gloo backend, over TCP. Each rank must call this with the same store. The
/// traffic is neither encrypted nor authenticated. `limit`: the longest wait for the other ranks.
/// Errors: ConnectionError if a rank does not come or the interface does not exist.
std::unique_ptr<Connections> connect_by_gloo(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                             const ListenAt& listen_at, std::chrono::milliseconds limit);

/// A store that is not used any more when the process that serves it has ended: c10d then prints a warning with a
/// backtrace for each use. Notices the end of a TCPStore's process before a use, and of any other store by the first
/// use that fails.
///
/// Thread safety: as the store. Errors: std::runtime_error after the end.
class WatchedStore : public c10d::PrefixStore {
 public:
  WatchedStore(const std::string& prefix, c10::intrusive_ptr<c10d::Store> store);

  c10::intrusive_ptr<c10d::Store> clone() override;
  void set(const std::string& key, const std::vector<std::uint8_t>& value) override;
  std::vector<std::uint8_t> compareSet(const std::string& key, const std::vector<std::uint8_t>& expected,
                                       const std::vector<std::uint8_t>& desired) override;
  std::vector<std::uint8_t> get(const std::string& key) override;
  std::int64_t add(const std::string& key, std::int64_t value) override;
  bool check(const std::vector<std::string>& keys) override;

 private:
  struct Watch;
  WatchedStore(const std::string& prefix, c10::intrusive_ptr<c10d::Store> store, std::shared_ptr<Watch> watch);

  template <typename Use>
  auto use(Use use);

  const std::shared_ptr<Watch> watch_;  // shared with clones
};

}  // namespace gpipe
