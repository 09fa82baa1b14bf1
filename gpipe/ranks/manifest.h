#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace gpipe {

/// What all ranks of a pipeline must agree on: names and values, in order. An empty value is not known, and agrees with any.
using Manifest = std::vector<std::pair<std::string, std::string>>;

/// Returns the first difference between the manifests of two ranks as a message; empty if there is none.
std::string compare(const Manifest& first, int first_rank, const Manifest& second, int second_rank);

/// Returns the key's value, or "" if it does not come before `end`. Calls `poll` while it waits.
std::string await_value(c10d::Store& store, const std::string& key, std::chrono::steady_clock::time_point end,
                        const std::function<void()>& poll);

/// Compares the manifests of all ranks, which meet in the store. Returns when all have come and agree. Calls `poll` while it
/// waits.
/// Errors: std::runtime_error, on all ranks, for a difference, with both values, or for ranks that do not come within
/// `limit`, with their numbers.
void check_manifests(c10d::Store& store, int rank, int size, const Manifest& manifest, std::chrono::milliseconds limit,
                     const std::function<void()>& poll);

}  // namespace gpipe
