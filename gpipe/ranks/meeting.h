#pragma once

#include "gpipe/ranks/store_thread.h"

// How ranks find each other and agree, by texts in a store. Each wait ends by its limit, and by an error of `poll`,
// which may be null. Errors also as StoreThread::ask().

namespace gpipe {

/// Tells the store that this process is a rank. Errors: std::runtime_error if another process has come as this rank.
void claim_rank(StoreThread& store, int rank, std::chrono::milliseconds limit, const Poll& poll);

/// Returns a name that all ranks get in this attempt to run the job, and that no earlier attempt had. torchrun keeps
/// its store when it restarts ranks, and the hosts' counts of restarts may differ. REQUIRES: the processes of earlier
/// attempts have ended. Errors: std::runtime_error for ranks that do not come within `limit`, with their numbers.
std::string name_attempt(StoreThread& store, int rank, int size, std::chrono::milliseconds limit, const Poll& poll);

/// What all ranks of a pipeline must agree on: names and values, in order. An empty value agrees with any.
using Manifest = std::vector<std::pair<std::string, std::string>>;

/// Compares the manifests of all ranks, under keys with a prefix. Returns when all have come and agree. Errors:
/// std::runtime_error, on all ranks, for a difference, with both values, or for ranks that do not come within `limit`,
/// with their numbers.
void check_manifests(StoreThread& store, const std::string& prefix, int rank, int size, const Manifest& manifest,
                     std::chrono::milliseconds limit, const Poll& poll);

}  // namespace gpipe
