#include "gpipe/schedules.h"

#include <optional>
#include <tuple>

namespace gpipe {
namespace {

class ListScheduler {
 public:
  ListScheduler(const Layout& layout, const ListOptions& options)
      : layout_(layout), options_(options), stages_(layout.stages), workers_(layout.workers()) {
    for (int s = layout.stages; s-- > 0;) {
      Worker& worker = workers_[layout.placement[s]];
      stages_[s].later_here = static_cast<int>(worker.stages.size());
      worker.stages.push_back(s);
    }
  }

  ListSchedule run() && {
    ListSchedule result{Schedule(workers_.size())};
    for (auto left = 3LL * layout_.stages * layout_.micro_batches; left > 0; ++result.makespan) {
      for (std::size_t w = 0; w < workers_.size(); ++w) {
        const auto action = choose(workers_[w], result.makespan);
        if (!action) continue;
        perform(workers_[w], *action, result.makespan + 1);
        result.lists[w].push_back(*action);
        --left;
      }
    }
    return result;
  }

 private:
  struct Stage {
    // When the actions that were chosen end, by micro-batch.
    std::vector<int> forwards = {};
    std::vector<int> backwards = {};
    int weights = 0;     // number of W that were chosen
    int later_here = 0;  // number of later stages of the same worker
  };

  struct Worker {
    std::vector<int> stages = {};
    std::int64_t cells = 0;
  };

  static bool has_ended(const std::vector<int>& ends, std::size_t micro_batch, int now) {
    return micro_batch < ends.size() && ends[micro_batch] <= now;
  }

  /// Returns the preferred one of the actions that the worker can start now.
  std::optional<Action> choose(const Worker& worker, int now) const {
    std::optional<Action> best;
    const auto offer = [&](Kind kind, int stage, std::size_t m) {
      const Action action{kind, stage, static_cast<int>(m)};
      if (!best || order(action) < order(*best)) best = action;
    };
    for (const int s : worker.stages) {
      const auto& [forwards, backwards, weights, later_here] = stages_[s];
      if (can_forward(worker, s, now)) offer(Kind::F, s, forwards.size());
      const auto m = backwards.size();
      const bool arrived = s + 1 == layout_.stages || has_ended(stages_[s + 1].backwards, m, now);
      if (arrived && m < forwards.size()) offer(Kind::I, s, m);
      if (weights < std::ssize(backwards)) offer(Kind::W, s, weights);
    }
    return best;
  }

  std::tuple<int, int, int> order(const Action& action) const {
    const auto [kind, stage, m] = action;
    const int by_kind = kind == Kind::W ? 2 : (kind == Kind::F) != options_.forward_first;
    return {by_kind, m, kind == Kind::F ? -stage : stage};
  }

  // Leaves room for one cell of each later stage of the worker, so the oldest micro-batch can go on.
  bool can_forward(const Worker& worker, int stage, int now) const {
    const auto& [forwards, backwards, weights, later_here] = stages_[stage];
    const auto most_cells = static_cast<std::int64_t>(worker.stages.size()) * options_.depth;
    return std::ssize(forwards) < layout_.micro_batches && worker.cells + 1 + later_here <= most_cells &&
           (stage == 0 || has_ended(stages_[stage - 1].forwards, forwards.size(), now));
  }

  void perform(Worker& worker, const Action& action, int end) {
    Stage& stage = stages_[action.stage];
    if (action.kind == Kind::F) stage.forwards.push_back(end);
    if (action.kind == Kind::I) stage.backwards.push_back(end);
    if (action.kind == Kind::W) ++stage.weights;
    worker.cells += (action.kind == Kind::F) - (action.kind == Kind::W);
  }

  const Layout& layout_;
  const ListOptions& options_;
  std::vector<Stage> stages_;
  std::vector<Worker> workers_;
};

}  // namespace

ListSchedule list_schedule(const Layout& layout, const ListOptions& options) {
  return ListScheduler(layout, options).run();
}

Schedule greedy(const Layout& layout) {
  auto backward_first = list_schedule(layout, {.depth = layout.workers(), .forward_first = false});
  auto forward_first = list_schedule(layout, {.depth = layout.workers(), .forward_first = true});
  return forward_first.makespan < backward_first.makespan ? forward_first.lists : backward_first.lists;
}

}  // namespace gpipe
