// The calls of a GPipe over ranks that train nothing.

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "gpipe/checks.h"
#include "gpipe/error_info.h"
#include "gpipe/gpipe.h"
#include "gpipe/ranks/items.h"

namespace gpipe {
namespace {

// Returns rank 0's numbers on all ranks. REQUIRES: within a call.
std::vector<double> share_numbers(Peers& peers, const std::vector<double>& numbers) {
  auto own = at::empty({std::ssize(numbers)}, at::kDouble);
  std::copy(numbers.begin(), numbers.end(), own.mutable_data_ptr<double>());
  Parcel parcel;
  parcel.add(std::move(own), /*gradient_wanted=*/false);
  const auto shared = peers.share(Peers::Result::kNumbers, /*owner=*/0, std::move(parcel)).tensors.front();
  const auto* first = shared.const_data_ptr<double>();
  return {first, first + shared.numel()};
}

}  // namespace

std::vector<std::string> GPipeImpl::gather(std::string bytes, const std::string& what) {
  auto* peers = pipeline_->peers();
  if (peers == nullptr) return {std::move(bytes)};
  MutexLock turn(pipeline_->turn());
  peers->agree({.what = "gather of " + what});
  return peers->gather(std::move(bytes));
}

Timeline GPipeImpl::gather(Timeline timeline) {
  auto* peers = pipeline_->peers();
  if (peers == nullptr) return timeline;
  MutexLock turn(pipeline_->turn());
  peers->agree({.what = "gather of a timeline"});
  const auto clocks = peers->clocks();
  const auto all = peers->gather(to_bytes(timeline.spans));
  if (all.empty()) return {};
  const auto& mesh = options_.ranks()->mesh();
  timeline.replicas = mesh.replicas;
  timeline.workers *= mesh.replicas;
  for (std::size_t r = 1; r < all.size(); ++r) {
    // The ranks of one host have the same clock.
    const double ahead = std::abs(clocks[r].ahead) <= clocks[r].error ? 0 : clocks[r].ahead;
    for (auto& span : to_items<Span>(all[r])) {
      span.start -= ahead;
      span.end -= ahead;
      span.worker += mesh.replica_of(static_cast<int>(r)) * pipeline_->workers();
      timeline.spans.push_back(span);
    }
  }
  return timeline;
}

std::uint64_t GPipeImpl::largest(std::uint64_t number) {
  auto* peers = pipeline_->peers();
  if (peers == nullptr) return number;
  MutexLock turn(pipeline_->turn());
  return peers->agree({.what = "largest", .number = number}).largest;
}

std::vector<double> GPipeImpl::sum_over_replicas(std::vector<double> numbers) {
  auto* peers = pipeline_->peers();
  if (peers == nullptr) return numbers;
  MutexLock turn(pipeline_->turn());
  peers->agree({.what = "sum of " + std::to_string(numbers.size()) + " numbers over replicas"});
  const auto of_ranks = peers->gather(to_bytes(numbers));
  std::vector<double> sums(numbers.size());
  for (int r = 0; r < peers->replicas() && !of_ranks.empty(); ++r) {
    const auto of_replica = to_items<double>(of_ranks[options_.ranks()->mesh().rank_at(/*position=*/0, r)]);
    for (std::size_t i = 0; i < sums.size(); ++i) sums[i] += of_replica.at(i);
  }
  return share_numbers(*peers, sums);
}

std::vector<double> GPipeImpl::of_all_parameters(std::vector<double> numbers) {
  const auto refuse = [&](const std::string& error) {
    withdraw(error);
    refuse_argument(error);
  };
  const auto own = static_cast<std::ptrdiff_t>(parameters().size());
  if (std::ssize(numbers) != own) {
    refuse("there must be one number per parameter, " + std::to_string(own) + ", but there are " +
           std::to_string(numbers.size()));
  }
  auto* peers = pipeline_->peers();
  if (peers == nullptr) return numbers;
  const auto known = std::count_if(parameter_names_.begin(), parameter_names_.end(), [&](const StateName& each) {
    return each.name == each.first && pipeline_->is_here(each.stage);
  });
  if (own != known) {
    refuse("the layers of this rank have " + std::to_string(own) + " parameters, but had " + std::to_string(known) +
           " when the pipeline was made; make a new pipeline on all ranks");
  }
  MutexLock turn(pipeline_->turn());
  peers->agree({.what = "numbers of all parameters"});
  std::vector<std::vector<double>> of_ranks;
  for (const auto& bytes : peers->gather(to_bytes(numbers))) of_ranks.push_back(to_items<double>(bytes));
  std::vector<double> all;
  std::vector<std::size_t> next(of_ranks.size());
  for (const auto& [name, stage, first] : parameter_names_) {
    const int owner = pipeline_->rank_of(stage);
    if (name == first && !of_ranks.empty()) all.push_back(of_ranks[owner].at(next[owner]++));
  }
  return share_numbers(*peers, all);
}

void GPipeImpl::withdraw(const std::string& reason) {
  auto* peers = pipeline_->peers();
  if (peers == nullptr) return;
  MutexLock turn(pipeline_->turn());
  peers->withdraw(reason);
}

}  // namespace gpipe
