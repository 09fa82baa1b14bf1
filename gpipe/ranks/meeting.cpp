#include "gpipe/ranks/meeting.h"

#include <unistd.h>

#include <map>
#include <random>

#include "absl/strings/str_join.h"
#include "gpipe/base/bytes.h"
#include "gpipe/base/checks.h"

namespace gpipe {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kInterval{10};

// The first difference between rank 0's manifest and another rank's; empty if there is none.
std::string difference(const Manifest& mine, const Manifest& other, int rank) {
  const std::map<std::string, std::string> values[] = {{mine.begin(), mine.end()}, {other.begin(), other.end()}};
  for (const auto* manifest : {&mine, &other}) {
    for (const auto& [name, value] : *manifest) {
      std::string of[2];
      for (const int k : {0, 1}) of[k] = values[k].contains(name) ? values[k].at(name) : "nothing";
      if (of[0] == of[1] || of[0].empty() || of[1].empty()) continue;
      return absl::StrCat("the ranks differ in ", name, ": rank 0 has ", of[0], ", but rank ", rank, " has ", of[1]);
    }
  }
  return "";
}

std::string absence(const std::vector<int>& missing, int size, std::chrono::milliseconds limit) {
  return absl::StrFormat("%s %s of %d did not come within %.1f s", missing.size() == 1 ? "rank" : "ranks",
                         absl::StrJoin(missing, ", "), size, static_cast<double>(limit.count()) / 1000);
}

std::string manifest_key(const std::string& prefix, int rank) { return absl::StrCat(prefix, "/manifest/", rank); }

// Rank 0's decision on all manifests; empty if they agree.
std::string decide(StoreThread& store, const std::string& prefix, int size, const Manifest& mine,
                   std::chrono::milliseconds limit, const Poll& poll) {
  const auto end = end_after(limit);
  std::vector<int> missing;
  std::string different;
  for (int r = 1; r < size; ++r) {
    const auto text = await_value(store, manifest_key(prefix, r), end, limit, poll);
    if (text.empty()) missing.push_back(r);
    if (text.empty() || !different.empty()) continue;
    Manifest other;
    for (ByteReader words(text); !words.done();) other.push_back({words.get<std::string>(), words.get<std::string>()});
    different = difference(mine, other, r);
  }
  return missing.empty() ? different : absence(missing, size, limit);
}

}  // namespace

void claim_rank(StoreThread& store, int rank, std::chrono::milliseconds limit, const Poll& poll) {
  char host[256] = {};
  gethostname(host, sizeof host - 1);
  // Containers may share a host's name and the numbers of processes.
  static const auto number = std::random_device()();
  const auto mine = absl::StrCat("process ", getpid(), " (", number, ") on host '", host, "'");
  const auto first = store.ask<std::string>(
      [=](c10d::Store& of_job) { return of_job.compareSet(absl::StrCat("rank ", rank), "", mine); }, limit, poll);
  if (first != mine) {
    throw_error("rank ", rank, " has already come to this job: ", first, ", but this is ", mine,
                "; give each job a MASTER_PORT of its own, and each process a RANK of its own");
  }
}

// A rank arrives under a number that it never had before. Only the present rank 0 answers that number.
std::string name_attempt(StoreThread& store, int rank, int size, std::chrono::milliseconds limit, const Poll& poll) {
  const auto arrivals = [](int r) { return absl::StrCat("arrivals of rank ", r); };
  const auto answer = [](int r, std::int64_t arrival) {
    return absl::StrCat("attempt of rank ", r, ", arrival ", arrival);
  };
  const auto joined = [](const std::string& name, int r) { return absl::StrCat("rank ", r, " joined ", name); };
  const auto add = [&](const std::string& key) {
    return store.ask<std::int64_t>([=](c10d::Store& of_job) { return of_job.add(key, 1); }, limit, poll);
  };
  const auto end = end_after(limit);
  if (rank != 0) {
    auto name = await_value(store, answer(rank, add(arrivals(rank))), end, limit, poll);
    if (name.empty()) throw_error("rank 0 did not come in time");
    add(joined(name, rank));
    return name;
  }
  const auto name = absl::StrCat("attempt", add("attempts"));
  const auto await_ranks = [=](c10d::Store& of_job) {
    std::vector<int> missing;
    for (int r = 1; r < size; ++r) {
      if (of_job.check({joined(name, r)})) continue;
      missing.push_back(r);
      // The same answer again changes nothing.
      if (const auto arrival = of_job.add(arrivals(r), 0); arrival != 0) of_job.set(answer(r, arrival), name);
    }
    return missing;
  };
  for (;; std::this_thread::sleep_for(kInterval)) {
    const auto missing = store.ask<std::vector<int>>(await_ranks, limit, poll);
    if (missing.empty()) return name;
    if (Clock::now() >= end) throw_error("these ranks did not come in time: ", absl::StrJoin(missing, ", "));
    if (poll) poll();
  }
}

void check_manifests(StoreThread& store, const std::string& prefix, int rank, int size, const Manifest& manifest,
                     std::chrono::milliseconds limit, const Poll& poll) {
  const std::string agreed = "agreed";
  const auto set = [&](const std::string& key, const std::string& value) {
    store.ask<int>([=](c10d::Store& of_job) { return of_job.set(key, value), 0; }, limit, poll);
  };
  const auto key = absl::StrCat(prefix, "/decision");
  std::string decision;
  if (rank == 0) {
    decision = decide(store, prefix, size, manifest, limit, poll);
    if (decision.empty()) decision = agreed;
    set(key, decision);
  } else {
    ByteWriter text;
    for (const auto& [name, value] : manifest) text.add(name, value);
    set(manifest_key(prefix, rank), text.take());
    // Rank 0 may have begun to wait later than this rank.
    const auto end = end_after(limit);
    decision = await_value(store, key, end + (end - Clock::now()), limit, poll);
    if (decision.empty()) decision = absence({0}, size, 2 * limit);
  }
  if (decision != agreed) throw_error("the ranks cannot make the pipeline: ", decision);
}

}  // namespace gpipe
