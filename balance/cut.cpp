#include "balance/cut.h"

#include <algorithm>
#include <limits>

#include "balance/segments.h"
#include "gpipe/base/checks.h"

namespace gpipe {

namespace {

constexpr double kForbidden = std::numeric_limits<double>::infinity();

/// The seconds per micro-batch that the busiest worker or link is busy. `without_links`: `options` without a network.
double load(const StageCost& stage, const std::vector<int>& ends, const RunOptions& options,
            const RunOptions& without_links) {
  const auto& placement = options.scheduling.placement;
  std::map<std::pair<int, int>, double> busy;  // a worker, or a link
  for (std::size_t s = 0; s < ends.size(); ++s) {
    busy[{placement[s], placement[s]}] += stage.seconds(s == 0 ? 0 : ends[s - 1], ends[s], without_links);
  }
  const auto [edges, bytes] = stage.edges(balance_of(ends), placement);
  for (std::size_t e = 0; e < edges.size(); ++e) {
    const int from = placement[edges[e].from];
    const int to = placement[edges[e].to];
    if (from == to) continue;
    const double seconds = options.network.link(from, to).sending(bytes[e]);
    busy[{from, to}] += seconds;
    busy[{to, from}] += seconds;  // its gradient
  }
  return std::ranges::max_element(busy, {}, [](const auto& each) { return each.second; })->second;
}

}  // namespace

std::vector<std::int64_t> balance_of(const std::vector<int>& ends) {
  std::vector<std::int64_t> balance;
  for (int first = 0; const int end : ends) balance.push_back(end - std::exchange(first, end));
  return balance;
}

void check_stages(int stages, int layers) {
  if (stages < 1 || stages > layers) {
    refuse_argument("the number of stages must be between 1 and the number of layers, ", layers, ", but is ", stages);
  }
}

std::vector<std::int64_t> cut_at(const StageCost& stage, int stages, const std::function<double(int, int, int)>& cost) {
  check_stages(stages, stage.layers());
  auto balance = best_partition(stage.layers(), stages, [&](int part, int first, int end) {
    const bool allowed = stage.can_cut_before(first) && stage.can_cut_before(end);
    return allowed ? cost(part, first, end) : kForbidden;
  });
  if (!balance.empty()) return balance;
  refuse_argument(
      stages,
      " stages would separate layers that share a buffer or parameter; use fewer stages, or give each layer its own");
}

std::vector<std::int64_t> balance_by_time(const Profile& profile, int partitions, const RunOptions& options) {
  const StageCost stage(profile);
  stage.check(options);
  return cut_at(stage, partitions, [&](int, int first, int end) { return stage.seconds(first, end, options); });
}

std::vector<std::int64_t> balance_by_size(const Profile& profile, int partitions, const RunOptions& options) {
  const Segments segments(profile);
  segments.cost().check(options);
  const InFlight in_flight{options.chunks, 1};
  const bool recomputes = options.checkpoint.of(0) != Checkpoint::kNever;
  return cut_at(segments.cost(), partitions, [&](int, int first, int end) {
    const auto recomputation = recomputes ? segments.whole(first, end) : Recomputation();
    return static_cast<double>(segments.bytes(first, end, in_flight, recomputation));
  });
}

std::vector<std::int64_t> balance_by_load(const StageCost& stage, const RunOptions& options) {
  const int stages = static_cast<int>(options.scheduling.placement.size());
  auto without_links = options;
  without_links.network = {};
  auto best = stage.ends(
      cut_at(stage, stages, [&](int, int first, int end) { return stage.seconds(first, end, without_links); }));
  double least = load(stage, best, options, without_links);
  const int step = std::max(1, stage.layers() / 64);
  const auto try_cuts = [&](std::vector<int> ends) {
    for (int s = 0; s + 1 < stages; ++s) {
      if (ends[s] <= (s == 0 ? 0 : ends[s - 1]) || ends[s] >= stage.layers() || !stage.can_cut_before(ends[s])) return;
    }
    const double busy = load(stage, ends, options, without_links);
    if (busy >= least) return;
    least = busy;
    best = std::move(ends);
  };
  for (double before = 0; before != least;) {
    before = least;
    for (int s = 0; 2 * s < stages - 1; ++s) {
      const int opposite = stages - 2 - s;
      for (int first = 1; first < stage.layers(); first += step) {
        for (int last = first + 1; opposite != s && last < stage.layers(); last += step) {
          auto ends = best;
          ends[s] = first;
          ends[opposite] = last;
          try_cuts(std::move(ends));
        }
        for (const int single : {s, opposite}) {
          auto ends = best;
          ends[single] = first;
          try_cuts(std::move(ends));
        }
      }
    }
  }
  return balance_of(best);
}

std::vector<std::optional<std::int64_t>> cut_bytes(const Profile& profile) {
  const StageCost stage(profile);
  const int layers = stage.layers();
  std::vector<std::optional<std::int64_t>> bytes(layers);
  for (int next = 1; next < layers; ++next) {
    if (stage.can_cut_before(next)) bytes[next - 1] = stage.bytes_in(next, layers);
  }
  return bytes;
}

}  // namespace gpipe
