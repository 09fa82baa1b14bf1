#include "gpipe/ranks/meeting.h"

#include <future>
#include <map>
#include <thread>

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

std::string manifest_key(int rank) { return absl::StrCat("manifest/", rank); }

// Rank 0's decision on all manifests; empty if they agree.
std::string decide(c10d::Store& store, int size, const Manifest& mine, std::chrono::milliseconds limit,
                   const std::function<void()>& poll) {
  const auto end = Clock::now() + limit;
  std::vector<int> missing;
  std::string different;
  for (int r = 1; r < size; ++r) {
    const auto text = await_value(store, manifest_key(r), end, poll);
    if (text.empty()) missing.push_back(r);
    if (text.empty() || !different.empty()) continue;
    Manifest other;
    for (ByteReader words(text); !words.done();) other.push_back({words.get<std::string>(), words.get<std::string>()});
    different = difference(mine, other, r);
  }
  return missing.empty() ? different : absence(missing, size, limit);
}

}  // namespace

std::string await_value(c10d::Store& store, const std::string& key, Clock::time_point end,
                        const std::function<void()>& poll) {
  while (!store.check({key})) {
    if (Clock::now() >= end) return "";
    if (poll) poll();
    std::this_thread::sleep_for(kInterval);
  }
  return store.get_to_str(key);
}

// A rank arrives under a number that it never had before. Only the present rank 0 answers that number.
std::string name_attempt(c10d::Store& store, int rank, int size, std::chrono::milliseconds limit,
                         const std::function<void()>& poll) {
  const auto arrivals = [](int r) { return absl::StrCat("arrivals of rank ", r); };
  const auto answer = [](int r, std::int64_t arrival) {
    return absl::StrCat("attempt of rank ", r, ", arrival ", arrival);
  };
  const auto joined = [](const std::string& name, int r) { return absl::StrCat("rank ", r, " joined ", name); };
  const auto end = Clock::now() + limit;
  if (rank != 0) {
    const auto arrival = store.add(arrivals(rank), 1);
    auto name = await_value(store, answer(rank, arrival), end, poll);
    if (name.empty()) throw_error("rank 0 did not come in time");
    store.set(joined(name, rank), "1");
    return name;
  }
  const auto name = absl::StrCat("attempt", store.add("attempts", 1));
  for (;;) {
    std::vector<int> missing;
    for (int r = 1; r < size; ++r) {
      if (store.check({joined(name, r)})) continue;
      missing.push_back(r);
      // The same answer again changes nothing.
      if (const auto arrival = store.add(arrivals(r), 0); arrival != 0) store.set(answer(r, arrival), name);
    }
    if (missing.empty()) return name;
    if (Clock::now() >= end) throw_error("these ranks did not come in time: ", absl::StrJoin(missing, ", "));
    if (poll) poll();
    std::this_thread::sleep_for(kInterval);
  }
}

void check_manifests(c10d::Store& store, int rank, int size, const Manifest& manifest, std::chrono::milliseconds limit,
                     const std::function<void()>& poll) {
  const std::string agreed = "agreed";
  std::string decision;
  if (rank == 0) {
    decision = decide(store, size, manifest, limit, poll);
    if (decision.empty()) decision = agreed;
    store.set("decision", decision);
  } else {
    ByteWriter text;
    for (const auto& [name, value] : manifest) text.add(name, value);
    store.set(manifest_key(rank), text.take());
    // Rank 0 may have begun to wait later than this rank.
    decision = await_value(store, "decision", Clock::now() + 2 * limit, poll);
    if (decision.empty()) decision = absence({0}, size, 2 * limit);
  }
  if (decision != agreed) throw_error("the ranks cannot make the pipeline: ", decision);
}

void while_polling(const std::function<void()>& poll, absl::FunctionRef<void()> wait,
                   absl::FunctionRef<void(const std::exception&)> on_stop) {
  if (!poll) return wait();
  auto waiting = std::async(std::launch::async, [&] { wait(); });
  std::exception_ptr stopped;
  while (waiting.wait_for(std::chrono::milliseconds(50)) == std::future_status::timeout) {
    if (stopped) continue;
    try {
      poll();
    } catch (const std::exception& error) {
      stopped = std::current_exception();
      on_stop(error);
    }
  }
  if (stopped) std::rethrow_exception(stopped);
  waiting.get();
}

}  // namespace gpipe
