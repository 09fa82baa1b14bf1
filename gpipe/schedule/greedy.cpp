#include "gpipe/schedule/greedy.h"

#include <algorithm>
#include <set>

#include "gpipe/base/checks.h"
#include "gpipe/schedule/verifier.h"

namespace gpipe {
namespace {

class ListScheduler {
 public:
  ListScheduler(const Workload& workload, const ListOptions& options)
      : work_(workload),
        options_(options),
        wiring_(workload.layout.stages, workload.edges),
        stages_(workload.layout.stages),
        workers_(workload.layout.workers()),
        result_{Schedule(workers_.size())} {
    for (int s = work_.layout.stages; s-- > 0;) {
      Worker& worker = workers_[work_.layout.placement[s]];
      stages_[s].later_here = static_cast<int>(worker.stages.size());
      worker.stages.push_back(s);
      if (s + 1 < work_.layout.stages) link(s, s + 1);
    }
    for (const Edge& edge : work_.edges) link(edge.from, edge.to);
  }

  ListSchedule run() && {
    for (std::size_t w = 0; w < workers_.size(); ++w) choose(static_cast<int>(w));
    while (!queue_.empty()) {
      const int worker = queue_.begin()->second;
      const Action action = workers_[worker].next->action;
      perform(worker, *workers_[worker].next);
      choose(worker);
      if (action.kind == Kind::W) continue;
      const Stage& stage = stages_[action.stage];
      for (const int taker : action.kind == Kind::F ? stage.later : stage.earlier) choose(taker);
    }
    return std::move(result_);
  }

 private:
  /// An action that a worker could run next, and when.
  struct Choice {
    Action action;
    double start = 0;
    double end = 0;
  };

  struct Stage {
    // When the actions that were chosen end, by micro-batch.
    std::vector<double> forwards;
    std::vector<double> backwards;
    int weights = 0;     ///< number of W that were chosen
    int later_here = 0;  ///< number of later stages of the same worker
    // The other workers that take what the stage puts.
    std::set<int> later;
    std::set<int> earlier;
  };

  struct Worker {
    std::vector<int> stages;
    std::int64_t cells = 0;
    int split = 0;  ///< I that wait for their W
    double clock = 0;
    std::optional<Choice> next;
  };

  void link(int from, int to) {
    const int sender = work_.layout.placement[from];
    const int receiver = work_.layout.placement[to];
    if (sender == receiver) return;
    stages_[from].later.insert(receiver);
    stages_[to].earlier.insert(sender);
  }

  double seconds(Kind kind, int stage) const { return work_.costs.actions[stage][static_cast<std::size_t>(kind)]; }

  bool recomputes(int m) const { return gpipe::recomputes(work_.checkpoint, m, work_.layout.micro_batches); }

  /// Chooses the worker's next action: the preferred one of the actions that can start first.
  void choose(int w) {
    Worker& worker = workers_[w];
    if (worker.next) queue_.erase({worker.next->start, w});
    worker.next.reset();
    for (const int stage : worker.stages) {
      for (const auto& choice : {forward(worker, stage), backward(worker, stage), weights(worker, stage)}) {
        if (choice && (!worker.next || order(*choice) < order(*worker.next))) worker.next = choice;
      }
    }
    if (worker.next) queue_.insert({worker.next->start, w});
  }

  std::tuple<double, int, int, int> order(const Choice& choice) const {
    const auto [kind, stage, m] = choice.action;
    const int by_kind = kind == Kind::W ? 2 : (kind == Kind::F) != options_.forward_first;
    return {choice.start, by_kind, m, kind == Kind::F ? -stage : stage};
  }

  std::optional<Choice> forward(const Worker& worker, int stage) const {
    const int m = static_cast<int>(stages_[stage].forwards.size());
    if (m == work_.layout.micro_batches) return std::nullopt;
    // Leaves room for one cell of each later stage, and runs the stages in order. So the oldest micro-batch can go on.
    const auto most_cells = static_cast<std::int64_t>(worker.stages.size()) * options_.depth;
    if (worker.cells + 1 + stages_[stage].later_here > most_cells) return std::nullopt;
    if (stage > 0 && stages_[stage - 1].forwards.size() <= static_cast<std::size_t>(m)) return std::nullopt;
    double start = worker.clock;
    for (const int e : wiring_.in[stage]) {
      const auto& ends = stages_[work_.edges[e].from].forwards;
      start = std::max(start, ends[m] + work_.costs.edges[e]);
    }
    const bool stored = recomputes(m) && !work_.costs.stored.empty();
    return Choice{{Kind::F, stage, m}, start, start + (stored ? work_.costs.stored[stage] : seconds(Kind::F, stage))};
  }

  /// B or I, together with its R.
  std::optional<Choice> backward(const Worker& worker, int stage) const {
    const int m = static_cast<int>(stages_[stage].backwards.size());
    if (stages_[stage].forwards.size() <= static_cast<std::size_t>(m)) return std::nullopt;
    const bool whole = options_.most_split == 0;
    if (!whole && worker.split >= options_.most_split) return std::nullopt;
    double arrival = 0;
    for (const int e : wiring_.out[stage]) {
      const auto& ends = stages_[work_.edges[e].to].backwards;
      if (ends.size() <= static_cast<std::size_t>(m)) return std::nullopt;
      arrival = std::max(arrival, ends[m] + work_.costs.edges[e]);
    }
    const double recompute = recomputes(m) ? seconds(Kind::R, stage) : 0;
    const Kind kind = whole ? Kind::B : Kind::I;
    return Choice{{kind, stage, m},
                  std::max(worker.clock, arrival - recompute),
                  std::max(worker.clock + recompute, arrival) + seconds(kind, stage)};
  }

  std::optional<Choice> weights(const Worker& worker, int stage) const {
    const int m = stages_[stage].weights;
    if (options_.most_split == 0 || stages_[stage].backwards.size() <= static_cast<std::size_t>(m)) return std::nullopt;
    return Choice{{Kind::W, stage, m}, worker.clock, worker.clock + seconds(Kind::W, stage)};
  }

  void perform(int w, const Choice choice) {
    const auto [kind, stage, m] = choice.action;
    Worker& worker = workers_[w];
    worker.clock = choice.end;
    result_.makespan = std::max(result_.makespan, choice.end);
    result_.lists[w].push_back(choice.action);
    if (kind == Kind::F) {
      stages_[stage].forwards.push_back(choice.end);
      ++worker.cells;
    }
    if (kind == Kind::B || kind == Kind::I) stages_[stage].backwards.push_back(choice.end);
    if (kind == Kind::B || kind == Kind::W) --worker.cells;
    if (kind == Kind::I) ++worker.split;
    if (kind == Kind::W) {
      --worker.split;
      ++stages_[stage].weights;
    }
  }

  const Workload& work_;
  const ListOptions& options_;
  const Wiring wiring_;
  std::vector<Stage> stages_;
  std::vector<Worker> workers_;
  std::set<std::pair<double, int>> queue_;  ///< when each worker with a choice can start it
  ListSchedule result_;
};

// The depths to try: all small ones, then steps of about a quarter.
std::vector<int> depths(int micro_batches) {
  std::vector<int> result;
  for (int depth = 1; depth < micro_batches; depth += std::max(1, depth / 4)) result.push_back(depth);
  result.push_back(micro_batches);
  return result;
}

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

ListSchedule list_schedule(const Workload& workload, const ListOptions& options) {
  return ListScheduler(workload, options).run();
}

Schedule greedy(const Layout& layout) {
  Workload workload{.layout = layout};
  for (int s = 0; s + 1 < layout.stages; ++s) workload.edges.push_back({s, s + 1, ""});
  workload.costs.actions.assign(layout.stages, {1, 0, 2, 1, 1});
  workload.costs.edges.assign(workload.edges.size(), 0);
  auto backward_first = list_schedule(workload, {.depth = layout.workers(), .forward_first = false});
  auto forward_first = list_schedule(workload, {.depth = layout.workers(), .forward_first = true});
  return forward_first.makespan < backward_first.makespan ? forward_first.lists : backward_first.lists;
}

std::optional<Schedule> greedy_schedule(const Workload& workload, const std::vector<std::int64_t>& most_bytes) {
  verify(workload.layout);
  const bool limited = !most_bytes.empty();
  require(!limited || std::ssize(most_bytes) == workload.layout.workers(),
          "greedy_schedule: got limits for %d workers, but the layout has %d: give one per worker, or none",
          most_bytes.size(), workload.layout.workers());
  auto costs = workload.costs;
  require(!limited || !costs.bytes.empty(),
          "greedy_schedule: got limits, but the costs have no bytes: give bytes per stage");
  if (!limited) costs.bytes.clear();  // saves time
  std::optional<Schedule> fastest;
  double makespan = std::numeric_limits<double>::infinity();
  // Simulates a schedule. Returns whether it keeps to the memory.
  const auto offer = [&](Schedule schedule) {
    const auto program = Program::make(workload.layout, workload.edges, std::move(schedule));
    const auto simulation = simulate(program, costs);
    const auto peaks = simulation.timeline.peak_bytes();
    for (std::size_t w = 0; w < most_bytes.size(); ++w) {
      if (peaks[w] > most_bytes[w]) return false;
    }
    if (simulation.makespan < makespan) {
      makespan = simulation.makespan;
      fastest = program.schedule();
    }
    return true;
  };
  for (const auto& rule : schedule_rules()) {
    if (!rule.misfit(workload.layout).empty()) continue;
    offer(make_schedule(rule.name, workload.layout, workload.checkpoint));
  }
  for (const bool forward_first : {false, true}) {
    for (const int most_split : {ListOptions::kUnlimited, 1, 0}) {
      for (const int depth : depths(workload.layout.micro_batches)) {
        auto made = list_schedule(workload, {depth, forward_first, most_split});
        if (made.makespan >= makespan) continue;
        if (!offer(with_recomputes(std::move(made.lists), workload.checkpoint, workload.layout.micro_batches))) {
          break;  // deeper ones need more
        }
      }
    }
  }
  for (int stage = 0; fastest && stage < workload.layout.stages; ++stage) offer(with_whole(*fastest, stage));
  return fastest;
}

}  // namespace gpipe
