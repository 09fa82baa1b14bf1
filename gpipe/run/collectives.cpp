// The calls of a GPipe over ranks that train nothing.

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "gpipe/base/bytes.h"
#include "gpipe/base/checks.h"
#include "gpipe/gpipe.h"
#include "gpipe/run/call.h"

namespace gpipe {
namespace {

// Returns rank 0's numbers on all ranks. REQUIRES: within a call.
std::vector<double> broadcast(Team& team, const std::vector<double>& numbers) {
  auto own = at::empty({std::ssize(numbers)}, at::kDouble);
  std::copy(numbers.begin(), numbers.end(), own.mutable_data_ptr<double>());
  Parcel parcel;
  parcel.add(std::move(own), /*gradient_wanted=*/false);
  const auto all = team.broadcast(Team::Group::kAll, /*owner=*/0, std::move(parcel)).tensors.front();
  const auto* first = all.const_data_ptr<double>();
  return {first, first + all.numel()};
}

}  // namespace

std::vector<std::string> GPipeImpl::gather(std::string bytes, const std::string& what) {
  if (pipeline_->team().size() == 1) return {std::move(bytes)};
  return in_call(*pipeline_, [&](Call& call) {
    call.agree({.what = "gather of " + what});
    return pipeline_->team().gather(std::move(bytes));
  });
}

Timeline GPipeImpl::gather(Timeline timeline) {
  auto& team = pipeline_->team();
  if (team.size() == 1) return timeline;
  return in_call(*pipeline_, [&](Call& call) -> Timeline {
    call.agree({.what = "gather of a timeline"});
    const auto clocks = team.clocks();
    const auto all = team.gather(to_bytes(timeline.spans));
    if (all.empty()) return {};
    timeline.replicas = team.replicas();
    timeline.workers *= team.replicas();
    for (int r = 1; r < std::ssize(all); ++r) {
      // The ranks of one host have the same clock.
      const double ahead = std::abs(clocks[r].ahead) <= clocks[r].error ? 0 : clocks[r].ahead;
      for (auto& span : to_items<Span>(all[r])) {
        span.start -= ahead;
        span.end -= ahead;
        span.worker += team.replica_of(r) * pipeline_->workers();
        timeline.spans.push_back(span);
      }
    }
    return std::move(timeline);
  });
}

std::uint64_t GPipeImpl::largest(std::uint64_t number) {
  if (pipeline_->team().size() == 1) return number;
  return in_call(*pipeline_, [&](Call& call) { return call.agree({.what = "largest", .number = number}).largest; });
}

std::vector<double> GPipeImpl::sum_over_replicas(std::vector<double> numbers) {
  auto& team = pipeline_->team();
  if (team.size() == 1) return numbers;
  return in_call(*pipeline_, [&](Call& call) {
    call.agree({.what = "sum of " + std::to_string(numbers.size()) + " numbers over replicas"});
    const auto of_ranks = team.gather(to_bytes(numbers));
    std::vector<double> sums(numbers.size());
    std::vector<bool> is_added(team.replicas());
    for (int r = 0; r < std::ssize(of_ranks); ++r) {
      if (is_added[team.replica_of(r)]) continue;  // not the first rank of its replica
      is_added[team.replica_of(r)] = true;
      const auto of_replica = to_items<double>(of_ranks[r]);
      for (std::size_t i = 0; i < sums.size(); ++i) sums[i] += of_replica.at(i);
    }
    return broadcast(team, sums);
  });
}

std::vector<double> GPipeImpl::of_all_parameters(std::vector<double> numbers, const std::string& what) {
  return in_call(*pipeline_, [&](Call& call) {
    const auto own = static_cast<std::ptrdiff_t>(parameters().size());
    if (std::ssize(numbers) != own) {
      refuse_argument("there must be one number per parameter, " + std::to_string(own) + ", but there are " +
                      std::to_string(numbers.size()));
    }
    if (pipeline_->team().size() == 1) return numbers;
    const auto known = std::count_if(parameter_names_.begin(), parameter_names_.end(), [&](const StateName& each) {
      return each.name == each.first && pipeline_->is_here(each.stage);
    });
    if (own != known) {
      refuse_argument("the layers of this rank have " + std::to_string(own) + " parameters, but had " +
                      std::to_string(known) + " when the pipeline was made; make a new pipeline on all ranks");
    }
    call.agree({.what = what + " of all parameters"});
    auto& team = pipeline_->team();
    std::vector<std::vector<double>> of_ranks;
    for (const auto& bytes : team.gather(to_bytes(numbers))) of_ranks.push_back(to_items<double>(bytes));
    std::vector<double> all;
    std::vector<std::size_t> next(of_ranks.size());
    for (const auto& [name, stage, first] : parameter_names_) {
      const int owner = pipeline_->rank_of(stage);
      if (name == first && !of_ranks.empty()) all.push_back(of_ranks[owner].at(next[owner]++));
    }
    return broadcast(team, all);
  });
}

void GPipeImpl::withdraw(const std::string& reason) {
  auto& team = pipeline_->team();
  if (team.size() == 1) return;
  MutexLock turn(pipeline_->call_mutex());
  team.withdraw(reason);
}

}  // namespace gpipe
