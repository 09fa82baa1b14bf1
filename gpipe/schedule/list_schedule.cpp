#include "gpipe/schedule/list_schedule.h"

#include <algorithm>
#include <optional>
#include <set>
#include <tuple>

#include "gpipe/schedule/merged.h"

namespace gpipe {
namespace {

/// The seconds of a stage's actions, in the mean of all micro-batches. An I has the time of its R too.
struct StageSeconds {
  double forward = 0;
  double input_gradient = 0;
  double weight_gradient = 0;

  double of(Kind kind) const { return kind == Kind::F ? forward : kind == Kind::I ? input_gradient : weight_gradient; }
};

class ListScheduler {
 public:
  /// `delays`: seconds of each edge.
  ListScheduler(const Layout& layout, const std::vector<Edge>& edges, const std::vector<double>& delays,
                const std::vector<StageSeconds>& seconds, double depth, bool forward_first)
      : layout_(layout),
        edges_(edges),
        delays_(delays),
        wiring_(layout.stages, edges),
        seconds_(seconds),
        forward_first_(forward_first),
        stages_(layout.stages),
        workers_(layout.workers()) {
    for (int s = layout.stages; s-- > 0;) {
      Worker& worker = workers_[layout.placement[s]];
      stages_[s].later_here = static_cast<int>(worker.stages.size());
      worker.stages.push_back(s);
    }
    for (auto& worker : workers_) {
      const auto count = static_cast<int>(worker.stages.size());
      worker.most_cells = std::max(count, static_cast<int>(count * depth + 1e-6));
    }
  }

  /// Returns the lists, and the seconds of the step.
  std::pair<Schedule, double> run() && {
    Schedule lists(workers_.size());
    std::set<double> times = {0};  // when something has ended
    for (auto left = 3LL * layout_.stages * layout_.micro_batches; left > 0;) {
      const double now = times.extract(times.begin()).value();
      for (std::size_t w = 0; w < workers_.size(); ++w) {
        const auto action = workers_[w].free <= now ? choose(workers_[w], now) : std::nullopt;
        if (!action) continue;
        const double end = now + seconds_[action->stage].of(action->kind);
        perform(workers_[w], *action, end);
        lists[w].push_back(*action);
        times.insert(end);
        for (const int e : wiring_.puts(*action)) times.insert(end + delays_[e]);
        --left;
      }
    }
    return {std::move(lists), std::ranges::max(workers_, {}, &Worker::free).free};
  }

 private:
  struct Stage {
    // When the actions that were chosen end, by micro-batch.
    std::vector<double> forwards = {};
    std::vector<double> backwards = {};
    int weights = 0;     // number of W that were chosen
    int later_here = 0;  // number of later stages of the same worker
  };

  struct Worker {
    std::vector<int> stages = {};
    int most_cells = 0;
    int cells = 0;
    double free = 0;  // when its action ends
  };

  /// Whether what an F or I takes has arrived.
  bool has_arrived(const Action& action, double now) const {
    const bool is_forward = action.kind == Kind::F;
    return std::ranges::all_of(wiring_.takes(action), [&](int e) {
      const auto& ends = is_forward ? stages_[edges_[e].from].forwards : stages_[edges_[e].to].backwards;
      const auto m = static_cast<std::size_t>(action.micro_batch);
      return m < ends.size() && ends[m] + delays_[e] <= now;
    });
  }

  /// Returns the preferred one of the actions that the worker can start now.
  std::optional<Action> choose(const Worker& worker, double now) const {
    std::optional<Action> best;
    const auto offer = [&](Kind kind, int stage, std::ptrdiff_t m) {
      const Action action{kind, stage, static_cast<int>(m)};
      if (!has_arrived(action, now) || (best && order(*best) < order(action))) return;
      best = action;
    };
    for (const int s : worker.stages) {
      const auto& [forwards, backwards, weights, later_here] = stages_[s];
      const auto made = std::ssize(forwards);
      const auto sent = std::ssize(backwards);
      // Leaves room for one cell of each later stage of the worker.
      if (made < layout_.micro_batches && worker.cells + 1 + later_here <= worker.most_cells) offer(Kind::F, s, made);
      if (sent < made) offer(Kind::I, s, sent);
      if (weights < sent) offer(Kind::W, s, weights);
    }
    return best;
  }

  std::tuple<int, int, int> order(const Action& action) const {
    const auto [kind, stage, m] = action;
    const int by_kind = kind == Kind::W ? 2 : (kind == Kind::F) != forward_first_;
    return {by_kind, m, kind == Kind::F ? -stage : stage};
  }

  void perform(Worker& worker, const Action& action, double end) {
    Stage& stage = stages_[action.stage];
    if (action.kind == Kind::F) stage.forwards.push_back(end);
    if (action.kind == Kind::I) stage.backwards.push_back(end);
    if (action.kind == Kind::W) ++stage.weights;
    worker.cells += (action.kind == Kind::F) - (action.kind == Kind::W);
    worker.free = end;
  }

  const Layout& layout_;
  const std::vector<Edge>& edges_;
  const std::vector<double>& delays_;
  const Wiring wiring_;
  const std::vector<StageSeconds>& seconds_;
  const bool forward_first_;
  std::vector<Stage> stages_;
  std::vector<Worker> workers_;
};

}  // namespace

Schedule list_schedule(const Layout& layout, const std::vector<Edge>& edges, const Costs& costs,
                       const Checkpoints& checkpoints, double depth) {
  const auto merged = merge_as_v(layout).value_or(merge_segments(layout));
  const auto& firsts = merged.firsts;
  std::vector<StageSeconds> seconds(merged.layout.stages);
  const auto stage_of = [&](int segment) {
    return static_cast<int>(std::ranges::upper_bound(firsts, segment) - firsts.begin()) - 1;
  };
  for (int s = 0; s < layout.stages; ++s) {
    const auto& [forward, recompute, backward, input_gradient, weight_gradient] = costs.actions[s];
    const double recomputed = checkpoints.of(s).recomputed(layout.micro_batches);
    const double share = recomputed / layout.micro_batches;
    auto& sum = seconds[stage_of(s)];
    sum.forward += costs.stored.empty() ? forward : share * costs.stored[s] + (1 - share) * forward;
    sum.input_gradient += share * recompute + input_gradient;
    sum.weight_gradient += weight_gradient;
  }
  std::vector<Edge> between;
  std::vector<double> delays;
  for (std::size_t e = 0; e < edges.size(); ++e) {
    const Edge edge{stage_of(edges[e].from), stage_of(edges[e].to), {}};
    if (edge.from == edge.to) continue;
    between.push_back(edge);
    delays.push_back(costs.edges[e]);
  }
  const auto schedule = [&](bool forward_first) {
    return ListScheduler(merged.layout, between, delays, seconds, depth, forward_first).run();
  };
  auto shorter = schedule(/*forward_first=*/false);
  if (auto other = schedule(/*forward_first=*/true); other.second < shorter.second) shorter = std::move(other);
  return with_segments(shorter.first, firsts);
}

Schedule list_schedule(const Layout& layout) {
  std::vector<Edge> edges;
  for (int s = 0; s + 1 < layout.stages; ++s) edges.push_back({s, s + 1, {}});
  const Costs equal{.actions = std::vector(layout.stages, std::array{1., 1., 2., 1., 1.}),
                    .edges = std::vector(edges.size(), 0.)};
  return list_schedule(layout, edges, equal, Checkpoint::kNever, layout.workers());
}

}  // namespace gpipe
