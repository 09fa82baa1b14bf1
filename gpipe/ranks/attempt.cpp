#include "gpipe/ranks/attempt.h"

#include <cstdint>
#include <stdexcept>
#include <thread>
#include <vector>

#include "absl/strings/str_join.h"
#include "gpipe/ranks/manifest.h"

namespace gpipe {
namespace {

constexpr std::chrono::milliseconds kLookInterval{10};

// A rank arrives under a number that it never had before. Only the present rank 0 answers that number.
std::string arrivals_of(int rank) { return "arrivals of rank " + std::to_string(rank); }
std::string answer_to(int rank, std::int64_t arrival) {
  return "attempt of rank " + std::to_string(rank) + ", arrival " + std::to_string(arrival);
}
std::string joined(const std::string& name, int rank) { return "rank " + std::to_string(rank) + " joined " + name; }

}  // namespace

std::string name_attempt(c10d::Store& store, int rank, int size, std::chrono::milliseconds limit,
                         const std::function<void()>& poll) {
  const auto end = std::chrono::steady_clock::now() + limit;
  if (rank != 0) {
    const auto arrival = store.add(arrivals_of(rank), 1);
    auto name = await_value(store, answer_to(rank, arrival), end, poll);
    if (name.empty()) throw std::runtime_error("[gpipe] rank 0 did not come in time");
    store.set(joined(name, rank), std::vector<std::uint8_t>{1});
    return name;
  }
  const auto name = "attempt" + std::to_string(store.add("attempts", 1));
  std::vector<std::int64_t> answered(size);
  std::vector<int> missing;
  do {
    missing.clear();
    for (int r = 1; r < size; ++r) {
      if (store.check({joined(name, r)})) continue;
      missing.push_back(r);
      const auto arrival = store.add(arrivals_of(r), 0);
      if (arrival == answered[r]) continue;
      store.set(answer_to(r, arrival), std::vector<std::uint8_t>(name.begin(), name.end()));
      answered[r] = arrival;
    }
    if (missing.empty()) return name;
    if (poll) poll();
    std::this_thread::sleep_for(kLookInterval);
  } while (std::chrono::steady_clock::now() < end);
  throw std::runtime_error("[gpipe] these ranks did not come in time: " + absl::StrJoin(missing, ", "));
}

}  // namespace gpipe
