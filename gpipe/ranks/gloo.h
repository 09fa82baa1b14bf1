#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <memory>
#include <string>

#include "gpipe/ranks.h"
#include "gpipe/ranks/connections.h"

namespace gpipe {

/// Connects the ranks of a job by c10d's Gloo backend, over TCP. Each rank must call this with the same store. The traffic
/// is neither encrypted nor authenticated. `limit`: the longest wait for the other ranks.
/// Errors: ConnectionError if a rank does not come or the interface does not exist.
std::unique_ptr<Connections> connect_by_gloo(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                             const ListenAt& listen_at, std::chrono::milliseconds limit);

}  // namespace gpipe
