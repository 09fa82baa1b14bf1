#pragma once

#include "gpipe/ranks.h"
#include "gpipe/ranks/connections.h"

namespace gpipe {

/// Returns the address of this host from which packets to `host` leave. Errors: std::runtime_error if there is none.
std::string local_address_towards(const std::string& host);

/// Returns a socket that listens at an address of this host, and nowhere else. The caller owns it. Errors:
/// std::runtime_error for an address that is not this host's, or a port that is taken.
int listen_at(const std::string& host, int port);

/// Connects the ranks of a job by c10d's Gloo backend, over TCP. `limit`: the longest wait for the other ranks. Errors:
/// ConnectionError if a rank does not come or the interface does not exist.
std::unique_ptr<Connections> connect_by_gloo(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                             const ListenAt& listen_at, std::chrono::milliseconds limit);

/// Returns a store with this prefix that is not used any more when the process that serves it has ended: c10d then
/// prints a warning with a backtrace for each use. Notices the end of a TCPStore's process before a use, and of any
/// other store by the first use that fails. Uses after the end throw std::runtime_error.
c10::intrusive_ptr<c10d::Store> watched_store(const std::string& prefix, c10::intrusive_ptr<c10d::Store> store);

}  // namespace gpipe
