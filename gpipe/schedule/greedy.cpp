#include "gpipe/schedule/greedy.h"

#include <algorithm>
#include <cstddef>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

#include "absl/strings/str_format.h"
#include "gpipe/schedule/verifier.h"
#include "gpipe/schedules.h"

namespace gpipe {
namespace {

/// Keeps the fastest of the schedules that it is offered.
class Search {
 public:
  Search(const Workload& work, const std::vector<std::int64_t>& most_bytes)
      : work_(work), costs_(work.costs), most_bytes_(most_bytes) {
    if (most_bytes.empty()) costs_.bytes.clear();  // saves time
  }

  /// Simulates the schedule. Returns whether it keeps to the memory.
  bool offer(Schedule schedule) {
    const auto program = make_program(work_.layout, work_.edges, std::move(schedule));
    const auto simulation = simulate(program, costs_);
    const auto peaks = simulation.timeline.peak_bytes();
    for (std::size_t w = 0; w < most_bytes_.size(); ++w) {
      if (peaks[w] > most_bytes_[w]) return false;
    }
    if (simulation.makespan < makespan_) {
      makespan_ = simulation.makespan;
      fastest_ = program.schedule();
    }
    return true;
  }

  double makespan() const { return makespan_; }
  const std::optional<Schedule>& fastest() const { return fastest_; }

 private:
  const Workload& work_;
  Costs costs_;
  const std::vector<std::int64_t>& most_bytes_;
  double makespan_ = std::numeric_limits<double>::infinity();
  std::optional<Schedule> fastest_;
};

void check(const Workload& work, const std::vector<std::int64_t>& most_bytes) {
  if (const auto status = verify(work.layout); !status.ok()) throw std::invalid_argument(std::string(status.message()));
  if (most_bytes.empty()) return;
  const auto workers = work.layout.workers();
  if (most_bytes.size() != static_cast<std::size_t>(workers)) {
    throw std::invalid_argument(absl::StrFormat(
        "greedy_schedule: got limits for %d workers, but the layout has %d: give one per worker, or none",
        most_bytes.size(), workers));
  }
  if (work.costs.bytes.empty()) {
    throw std::invalid_argument("greedy_schedule: got limits, but the costs have no bytes: give bytes per stage");
  }
}

// The depths to try: all small ones, then steps of about a quarter.
std::vector<int> depths(int micro_batches) {
  std::vector<int> result;
  for (int depth = 1; depth < micro_batches; depth += std::max(1, depth / 4)) result.push_back(depth);
  result.push_back(micro_batches);
  return result;
}

// Makes the stage's backwards whole.
Schedule with_whole(Schedule schedule, int stage) {
  for (auto& list : schedule) {
    std::erase_if(list, [&](const Action& action) { return action.stage == stage && action.kind == Kind::W; });
    for (Action& action : list) {
      if (action.stage == stage && action.kind == Kind::I) action.kind = Kind::B;
    }
  }
  return schedule;
}

}  // namespace

std::optional<Schedule> greedy_schedule(const Workload& workload, const std::vector<std::int64_t>& most_bytes) {
  check(workload, most_bytes);
  Search search(workload, most_bytes);
  for (const auto& rule : schedule_rules()) {
    if (!rule.misfit(workload.layout).empty()) continue;
    search.offer(make_schedule(rule.name, workload.layout, workload.checkpoint));
  }
  for (const bool forward_first : {false, true}) {
    for (const int most_split : {ListOptions::kUnlimited, 1, 0}) {
      for (const int depth : depths(workload.layout.micro_batches)) {
        auto [lists, makespan] = list_schedule(workload, {depth, forward_first, most_split});
        if (makespan >= search.makespan()) continue;
        lists = with_recomputes(std::move(lists), workload.checkpoint, workload.layout.micro_batches);
        if (!search.offer(std::move(lists))) break;  // deeper ones need more
      }
    }
  }
  if (!search.fastest()) return std::nullopt;
  for (int stage = 0; stage < workload.layout.stages; ++stage) search.offer(with_whole(*search.fastest(), stage));
  return search.fastest();
}

}  // namespace gpipe
