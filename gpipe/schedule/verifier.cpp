#include "gpipe/schedule/verifier.h"

#include <algorithm>
#include <array>

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "gpipe/base/checks.h"

namespace gpipe {
namespace {

using absl::StrFormat;

constexpr int kMissing = -1;
constexpr std::array kKinds = {Kind::F, Kind::R, Kind::B, Kind::I, Kind::W};

/// The indices of the actions of one cell in their worker's list, by Kind.
class CellActions {
 public:
  int& operator[](Kind kind) { return indices_[static_cast<std::size_t>(kind)]; }
  int operator[](Kind kind) const { return indices_[static_cast<std::size_t>(kind)]; }
  bool has(Kind kind) const { return (*this)[kind] != kMissing; }
  bool has_backward() const { return has(Kind::B) || has(Kind::I) || has(Kind::W); }

 private:
  std::array<int, kKinds.size()> indices_ = {kMissing, kMissing, kMissing, kMissing, kMissing};
};

std::string label(const std::vector<Edge>& edges, int edge) {
  const Edge& it = edges[edge];
  return StrFormat("edge %d (%sstage %d to %d)", edge, it.name.empty() ? "" : "'" + it.name + "', ", it.from, it.to);
}

void verify_edges(const Layout& layout, const std::vector<Edge>& edges) {
  for (std::size_t e = 0; e < edges.size(); ++e) {
    const Edge& edge = edges[e];
    if (edge.from < 0 || edge.to >= layout.stages || edge.from >= edge.to) {
      refuse_argument(label(edges, static_cast<int>(e)), " goes from stage ", edge.from, " to stage ", edge.to,
                      ": it must go to a later stage, within 0..", layout.stages - 1);
    }
  }
}

/// Finds the actions of every cell. Refuses actions outside the layout, on the wrong worker, or repeated.
std::vector<CellActions> locate(const Layout& layout, const Schedule& schedule) {
  if (std::ssize(schedule) != layout.workers()) {
    refuse_argument("the schedule has ", schedule.size(), " lists, but the placement has ", layout.workers(),
                    " workers: give one list per worker");
  }
  std::vector<CellActions> cells(static_cast<std::size_t>(layout.stages) * layout.micro_batches);
  for (int worker = 0; worker < layout.workers(); ++worker) {
    for (std::size_t i = 0; i < schedule[worker].size(); ++i) {
      const Action& action = schedule[worker][i];
      const auto [kind, stage, m] = action;
      const auto fail = [&](const auto&... why) {
        refuse_argument("worker ", worker, " has ", to_string(action), why...);
      };
      if (stage < 0 || stage >= layout.stages) {
        fail(", but stage ", stage, " does not exist: use 0..", layout.stages - 1);
      }
      if (m < 0 || m >= layout.micro_batches) {
        fail(", but micro-batch ", m, " does not exist: use 0..", layout.micro_batches - 1);
      }
      if (const int owner = layout.placement[stage]; owner != worker) {
        fail(", but stage ", stage, " is placed on worker ", owner, ": move it there");
      }
      int& index = cells[static_cast<std::size_t>(stage) * layout.micro_batches + m][kind];
      if (index != kMissing) fail(" twice: remove one");
      index = static_cast<int>(i);
    }
  }
  return cells;
}

/// Checks which actions a cell has and their order: rules 2 and 3.
void verify_cell(int stage, int micro_batch, const CellActions& cell, bool has_backward) {
  const auto name = [&](Kind kind) { return to_string(Action{kind, stage, micro_batch}); };
  const auto need = [&](Kind kind, const std::string& why) {
    if (!cell.has(kind)) refuse_argument("the schedule lacks ", name(kind), ": ", why);
  };
  need(Kind::F, "every cell needs one forward");
  if (!has_backward) {
    if (cell.has(Kind::R)) refuse_argument("the schedule has ", name(Kind::R), " but no backward: remove it");
    return;
  }
  if (!cell.has_backward()) need(Kind::B, "other cells have a backward, so this one needs B, or I and W");
  for (const Kind split : {Kind::I, Kind::W}) {
    if (!cell.has(split)) continue;
    if (cell.has(Kind::B)) {
      refuse_argument("the schedule has both ", name(Kind::B), " and ", name(split), ": keep either B, or I and W");
    }
    need(split == Kind::I ? Kind::W : Kind::I, name(split) + " needs it");
  }
  Kind before = Kind::F;
  for (const Kind kind : kKinds) {
    if (!cell.has(kind)) continue;
    if (cell[kind] < cell[before]) {
      refuse_argument(name(kind), " stands before ", name(before),
                      ": move it after; the order in a cell is F, R, B or F, R, I, W");
    }
    before = kind;
  }
}

constexpr double kAbsent = -1;  // of an arrival

/// One direction of one edge.
struct Direction {
  double latency = 0;
  double sending = 0;
  double* link_free = nullptr;  ///< when the link from the producer to the consumer has sent what was put before
  int consumer = 0;
  /// When each micro-batch can be taken; kAbsent before its put.
  std::vector<double> arrivals;
};

/// A worker's position: its current action, and how many of that action's edges it has taken.
struct Progress {
  std::size_t next = 0;  ///< index of the current action in the worker's list
  std::size_t taken = 0;
  double clock = 0;
};

/// Advances the workers in any order, each as far as possible. No event queue is needed, because a worker's times
/// depend only on its own list and on its exchanges, and a link has one producer.
class Replayer {
 public:
  Replayer(const Layout& layout, const std::vector<Edge>& edges, const Wiring& wiring, const Schedule& schedule,
           absl::FunctionRef<double(const Action&)> seconds, const std::vector<double>& latencies,
           const std::vector<double>& sending)
      : wiring_(wiring),
        schedule_(schedule),
        seconds_(seconds),
        progress_(schedule.size()),
        queued_(schedule.size(), true) {
    directions_.reserve(2 * edges.size());
    for (std::size_t e = 0; e < edges.size(); ++e) {
      for (const bool gradient : {false, true}) {
        const int producer = layout.placement[gradient ? edges[e].to : edges[e].from];
        const int consumer = layout.placement[gradient ? edges[e].from : edges[e].to];
        directions_.push_back({.latency = latencies[e],
                               .sending = sending.empty() ? 0 : sending[e],
                               .link_free = &links_free_[{producer, consumer}],
                               .consumer = consumer,
                               .arrivals = std::vector<double>(layout.micro_batches, kAbsent)});
      }
    }
    replay_.spans.resize(schedule.size());
    for (std::size_t w = schedule.size(); w-- > 0;) {
      replay_.spans[w].reserve(schedule[w].size());
      ready_.push_back(static_cast<int>(w));
    }
  }

  Replay run() && {
    while (!ready_.empty()) {
      const int worker = ready_.back();
      ready_.pop_back();
      advance(worker);
      queued_[worker] = false;
    }
    for (std::size_t w = 0; w < schedule_.size(); ++w) {
      const Progress& at = progress_[w];
      if (at.next == schedule_[w].size()) continue;
      const Action& action = schedule_[w][at.next];
      replay_.blocked.push_back({static_cast<int>(w), action, wiring_.takes(action)[at.taken]});
    }
    return std::move(replay_);
  }

 private:
  void advance(int worker) {
    Progress& at = progress_[worker];
    for (; at.next < schedule_[worker].size(); ++at.next) {
      const Action& action = schedule_[worker][at.next];
      const auto takes = wiring_.takes(action);
      for (; at.taken < takes.size(); ++at.taken) {
        if (!take(direction(takes[at.taken], action.kind), action.micro_batch, at.clock)) return;
      }
      const double start = at.clock;
      at.clock += seconds_(action);
      replay_.spans[worker].push_back({worker, action, start, at.clock, 0});
      for (const int edge : wiring_.puts(action)) put(direction(edge, action.kind), action.micro_batch, at.clock);
      at.taken = 0;
    }
  }

  Direction& direction(int edge, Kind kind) {
    return directions_[2 * static_cast<std::size_t>(edge) + (kind != Kind::F)];
  }

  static bool take(const Direction& direction, int micro_batch, double& clock) {
    const double arrival = direction.arrivals[micro_batch];
    if (arrival == kAbsent) return false;
    clock = std::max(clock, arrival);
    return true;
  }

  void put(Direction& direction, int micro_batch, double clock) {
    const double start = std::max(clock, *direction.link_free);
    *direction.link_free = start + direction.sending;
    direction.arrivals[micro_batch] = start + direction.latency;
    if (queued_[direction.consumer]) return;
    queued_[direction.consumer] = true;
    ready_.push_back(direction.consumer);
  }

  const Wiring& wiring_;
  const Schedule& schedule_;
  const absl::FunctionRef<double(const Action&)> seconds_;
  std::vector<Direction> directions_;
  std::map<std::pair<int, int>, double> links_free_;  ///< by producer and consumer
  std::vector<Progress> progress_;
  std::vector<int> ready_;
  /// True for the workers in ready_ and for the one being advanced, which must not wake itself.
  std::vector<bool> queued_;
  Replay replay_;
};

void verify_progress(const Layout& layout, const std::vector<Edge>& edges, const Schedule& schedule) {
  const auto free = [](const Action&) { return 0.0; };
  const auto waiting = replay(layout, edges, Wiring(layout.stages, edges), schedule, free,
                              /*latencies=*/std::vector<double>(edges.size()))
                           .blocked;
  if (waiting.empty()) return;
  const auto describe = [&](std::string* out, const Blocked& it) {
    absl::StrAppendFormat(out, "worker %d waits to take %s%s for %s", it.worker,
                          it.action.kind == Kind::F ? "" : "the gradient of ", label(edges, it.edge),
                          to_string(it.action));
  };
  refuse_argument("the schedule deadlocks: ", absl::StrJoin(waiting, "; ", describe), ". Reorder the lists");
}

bool ends_cell(const Action& action) { return action.kind == Kind::B || action.kind == Kind::W; }

/// Returns, by stage, the most cells at once that have begun and not ended.
template <typename Begins, typename Ends>
std::vector<int> most_at_once(int stages, const Schedule& schedule, Begins begins, Ends ends) {
  std::vector<int> now(stages);
  std::vector<int> most(stages);
  for (const auto& list : schedule) {
    for (const Action& action : list) {
      const int stage = action.stage;
      if (stage < 0 || stage >= stages) continue;  // the schedule may not be verified yet
      if (begins(action)) most[stage] = std::max(most[stage], ++now[stage]);
      if (ends(action)) --now[stage];
    }
  }
  return most;
}

}  // namespace

Replay replay(const Layout& layout, const std::vector<Edge>& edges, const Wiring& wiring, const Schedule& schedule,
              absl::FunctionRef<double(const Action&)> seconds, const std::vector<double>& latencies,
              const std::vector<double>& sending) {
  return Replayer(layout, edges, wiring, schedule, seconds, latencies, sending).run();
}

void verify(const Layout& layout) {
  const int stages = layout.stages;
  if (stages < 1) refuse_argument("the layout has ", stages, " stages: give it at least 1");
  if (layout.micro_batches < 1) {
    refuse_argument("the layout has ", layout.micro_batches, " micro-batches: give it at least 1");
  }
  if (static_cast<std::int64_t>(stages) * layout.micro_batches > kMostCells) {
    refuse_argument("the layout has ", stages, " stages and ", layout.micro_batches, " micro-batches: use at most ",
                    kMostCells, " cells (stages times micro-batches)");
  }
  if (std::ssize(layout.placement) != stages) {
    refuse_argument("the placement has ", layout.placement.size(), " entries, but the layout has ", stages,
                    " stages: give one worker per stage");
  }
  std::vector<bool> used(stages, false);
  for (int stage = 0; stage < stages; ++stage) {
    const int worker = layout.placement[stage];
    if (worker < 0 || worker >= stages) {
      refuse_argument("stage ", stage, " is placed on worker ", worker, ": with ", stages, " stages, use workers 0..",
                      stages - 1);
    }
    used[worker] = true;
  }
  const int last = layout.workers() - 1;
  for (int worker = 0; worker < last; ++worker) {
    if (!used[worker]) {
      refuse_argument("worker ", worker, " has no stage, but worker ", last, " has: number the workers without gaps");
    }
  }
}

Peaks verify(const Layout& layout, const std::vector<Edge>& edges, const Schedule& schedule) {
  verify(layout);
  verify_edges(layout, edges);
  const auto cells = locate(layout, schedule);
  const bool has_backward =
      std::any_of(cells.begin(), cells.end(), [](const CellActions& c) { return c.has_backward(); });
  for (int stage = 0; stage < layout.stages; ++stage) {
    for (int m = 0; m < layout.micro_batches; ++m) {
      verify_cell(stage, m, cells[static_cast<std::size_t>(stage) * layout.micro_batches + m], has_backward);
    }
  }
  verify_progress(layout, edges, schedule);
  if (!has_backward) return {std::vector<int>(layout.stages, 1), std::vector<int>(layout.stages, 0)};
  const auto builds_graph = [&](const Action& action) {
    const CellActions& cell = cells[static_cast<std::size_t>(action.stage) * layout.micro_batches + action.micro_batch];
    return action.kind == (cell.has(Kind::R) ? Kind::R : Kind::F);
  };
  return {most_cells(schedule, layout.stages), most_at_once(layout.stages, schedule, builds_graph, ends_cell)};
}

std::vector<int> most_cells(const Schedule& schedule, int stages) {
  const auto begins = [](const Action& action) { return action.kind == Kind::F; };
  return most_at_once(stages, schedule, begins, ends_cell);
}

int peak_cells(const std::vector<Action>& list) {
  int live = 0;
  int peak = 0;
  for (const Action& action : list) {
    if (action.kind == Kind::F) peak = std::max(peak, ++live);
    if (ends_cell(action)) --live;
  }
  return peak;
}

}  // namespace gpipe
