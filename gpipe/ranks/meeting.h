#pragma once

#include "absl/functional/function_ref.h"
#include "gpipe/ranks.h"
#include "gpipe/ranks/connections.h"

// How ranks find each other, agree and connect. `poll`, which may be null, is called while they wait; its errors end the
// wait.

namespace gpipe {

/// Returns the address of this host from which packets to `host` leave. Errors: std::runtime_error if there is none.
std::string local_address_towards(const std::string& host);

/// Returns a socket that listens at an address of this host, and nowhere else. The caller owns it. Errors:
/// std::runtime_error for an address that is not this host's, or a port that is taken.
int listen_at(const std::string& host, int port);

/// Connects the ranks of a job by c10d's Gloo backend, over TCP. Errors: ConnectionError, also after `limit`.
std::unique_ptr<Connections> connect_by_gloo(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                             const ListenAt& listen_at, std::chrono::milliseconds limit);

/// Returns a store with this prefix that is not used any more when the process that serves it has ended: c10d then
/// prints a warning with a backtrace for each use. Notices the end of a TCPStore's process before a use, and of any
/// other store by the first use that fails. Uses after the end throw std::runtime_error.
c10::intrusive_ptr<c10d::Store> watched_store(const std::string& prefix, c10::intrusive_ptr<c10d::Store> store);

/// Returns the key's value, or "" if it does not come before `end`.
std::string await_value(c10d::Store& store, const std::string& key, std::chrono::steady_clock::time_point end,
                        const std::function<void()>& poll);

/// Returns a name that all ranks get in this attempt to run the job, and that no earlier attempt had. torchrun keeps
/// its store when it restarts ranks, and the hosts' counts of restarts may differ. REQUIRES: the processes of earlier
/// attempts have ended. Errors: std::runtime_error for ranks that do not come within `limit`, with their numbers.
std::string name_attempt(c10d::Store& store, int rank, int size, std::chrono::milliseconds limit,
                         const std::function<void()>& poll);

/// What all ranks of a pipeline must agree on: names and values, in order. An empty value agrees with any.
using Manifest = std::vector<std::pair<std::string, std::string>>;

/// Compares the manifests of all ranks. Returns when all have come and agree. Errors: std::runtime_error, on all ranks,
/// for a difference, with both values, or for ranks that do not come within `limit`, with their numbers.
void check_manifests(c10d::Store& store, int rank, int size, const Manifest& manifest, std::chrono::milliseconds limit,
                     const std::function<void()>& poll);

/// Runs `wait` on another thread and calls `poll` on this one every 50 ms meanwhile. Passes an exception of `poll` to
/// `on_stop`, which must make `wait` end soon, and throws it at the end. Without `poll`, runs `wait` here.
void while_polling(const std::function<void()>& poll, absl::FunctionRef<void()> wait,
                   absl::FunctionRef<void(const std::exception&)> on_stop);

}  // namespace gpipe
