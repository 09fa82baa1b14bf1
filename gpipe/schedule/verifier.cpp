#include "gpipe/schedule/verifier.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "gpipe/schedule/replay.h"

namespace gpipe {
namespace {

using absl::InvalidArgumentError;
using absl::StrFormat;

constexpr int kMissing = -1;
constexpr std::array kKinds = {Kind::F, Kind::R, Kind::B, Kind::I, Kind::W};

/// Where the actions of one cell stand in their worker's list, indexed by Kind.
class Places {
 public:
  int& operator[](Kind kind) { return places_[static_cast<std::size_t>(kind)]; }
  int operator[](Kind kind) const { return places_[static_cast<std::size_t>(kind)]; }
  bool has(Kind kind) const { return (*this)[kind] != kMissing; }
  bool has_backward() const { return has(Kind::B) || has(Kind::I) || has(Kind::W); }

 private:
  std::array<int, kKinds.size()> places_ = {kMissing, kMissing, kMissing, kMissing, kMissing};
};

std::string label(const std::vector<Edge>& edges, int edge) {
  const Edge& it = edges[edge];
  if (it.name.empty()) return StrFormat("edge %d (stage %d to %d)", edge, it.from, it.to);
  return StrFormat("edge %d ('%s')", edge, it.name);
}

absl::Status verify_edges(const Layout& layout, const std::vector<Edge>& edges) {
  for (std::size_t e = 0; e < edges.size(); ++e) {
    const Edge& edge = edges[e];
    const std::string name = label(edges, static_cast<int>(e));
    if (edge.from < 0 || edge.to >= layout.stages || edge.from >= edge.to) {
      return InvalidArgumentError(
          StrFormat("%s goes from stage %d to stage %d: it must go to a later stage, within 0..%d", name, edge.from,
                    edge.to, layout.stages - 1));
    }
    if (edge.capacity < 1) {
      return InvalidArgumentError(StrFormat("%s has capacity %d: give it at least 1", name, edge.capacity));
    }
  }
  return absl::OkStatus();
}

/// Finds the actions of every cell. Refuses actions outside the layout, on the wrong worker, or repeated.
absl::StatusOr<std::vector<Places>> locate(const Layout& layout, const Schedule& schedule) {
  if (schedule.size() != static_cast<std::size_t>(layout.workers())) {
    return InvalidArgumentError(
        StrFormat("the schedule has %d lists, but the placement has %d workers: give one list per worker",
                  schedule.size(), layout.workers()));
  }
  std::vector<Places> cells(static_cast<std::size_t>(layout.stages) * layout.micro_batches);
  for (int worker = 0; worker < layout.workers(); ++worker) {
    const auto& list = schedule[worker];
    for (std::size_t i = 0; i < list.size(); ++i) {
      const Action& action = list[i];
      const auto here = [&] { return StrFormat("worker %d has %s", worker, to_string(action)); };
      if (action.stage < 0 || action.stage >= layout.stages) {
        return InvalidArgumentError(
            StrFormat("%s, but stage %d does not exist: use 0..%d", here(), action.stage, layout.stages - 1));
      }
      if (action.micro_batch < 0 || action.micro_batch >= layout.micro_batches) {
        return InvalidArgumentError(StrFormat("%s, but micro-batch %d does not exist: use 0..%d", here(),
                                              action.micro_batch, layout.micro_batches - 1));
      }
      if (layout.placement[action.stage] != worker) {
        return InvalidArgumentError(StrFormat("%s, but stage %d is placed on worker %d: move it there", here(),
                                              action.stage, layout.placement[action.stage]));
      }
      int& place =
          cells[static_cast<std::size_t>(action.stage) * layout.micro_batches + action.micro_batch][action.kind];
      if (place != kMissing) return InvalidArgumentError(StrFormat("%s twice: remove one", here()));
      place = static_cast<int>(i);
    }
  }
  return cells;
}

/// Checks which actions a cell has and their order: rules 2 and 3.
absl::Status verify_cell(int stage, int micro_batch, const Places& cell, bool has_backward) {
  const auto name = [&](Kind kind) { return to_string(Action{kind, stage, micro_batch}); };
  const auto lacks = [&](Kind kind, const std::string& why) {
    return InvalidArgumentError(StrFormat("the schedule lacks %s: %s", name(kind), why));
  };
  if (!cell.has(Kind::F)) return lacks(Kind::F, "every cell needs one forward");
  if (!has_backward) {
    if (!cell.has(Kind::R)) return absl::OkStatus();
    return InvalidArgumentError(StrFormat("the schedule has %s but no backward: remove it", name(Kind::R)));
  }
  if (!cell.has_backward()) return lacks(Kind::B, "other cells have a backward, so this one needs B, or I and W");
  for (const Kind split : {Kind::I, Kind::W}) {
    if (!cell.has(split)) continue;
    if (cell.has(Kind::B)) {
      return InvalidArgumentError(
          StrFormat("the schedule has both %s and %s: keep either B, or I and W", name(Kind::B), name(split)));
    }
    const Kind other = split == Kind::I ? Kind::W : Kind::I;
    if (!cell.has(other)) return lacks(other, StrFormat("%s needs it", name(split)));
  }
  Kind before = Kind::F;
  for (const Kind kind : kKinds) {
    if (!cell.has(kind)) continue;
    if (cell[kind] < cell[before]) {
      return InvalidArgumentError(
          StrFormat("%s stands before %s: move it after; the order in a cell is F, R, B or F, R, I, W", name(kind),
                    name(before)));
    }
    before = kind;
  }
  return absl::OkStatus();
}

absl::Status verify_progress(const Layout& layout, const std::vector<Edge>& edges, const Schedule& schedule) {
  const auto free = [](const Action&) { return 0.0; };
  const Replay result = replay(layout, edges, Wiring(layout.stages, edges), schedule, free,
                               /*latencies=*/std::vector<double>(edges.size()));
  if (result.blocked.empty()) return absl::OkStatus();
  const auto describe = [&](std::string* out, const Blocked& it) {
    absl::StrAppendFormat(out, "worker %d waits to %s %s%s for %s", it.worker, it.puts ? "put" : "take",
                          it.action.kind == Kind::F ? "" : "the gradient of ", label(edges, it.edge),
                          to_string(it.action));
    if (it.puts) absl::StrAppendFormat(out, ", which is at its capacity of %d", edges[it.edge].capacity);
  };
  return absl::FailedPreconditionError(
      StrFormat("the schedule deadlocks: %s. Reorder the lists, or raise the capacity of an edge that is full",
                absl::StrJoin(result.blocked, "; ", describe)));
}

Peaks count(const Layout& layout, const Schedule& schedule, const std::vector<Places>& cells, bool has_backward) {
  Peaks peaks = {.live = std::vector<int>(layout.stages, 1), .graphs = std::vector<int>(layout.stages, 0)};
  if (!has_backward) return peaks;
  std::vector<int> live(layout.stages, 0);
  std::vector<int> graphs(layout.stages, 0);
  for (const auto& list : schedule) {
    for (const Action& action : list) {
      const int s = action.stage;
      const Places& cell = cells[static_cast<std::size_t>(s) * layout.micro_batches + action.micro_batch];
      if (action.kind == Kind::F) peaks.live[s] = std::max(peaks.live[s], ++live[s]);
      if (action.kind == (cell.has(Kind::R) ? Kind::R : Kind::F))
        peaks.graphs[s] = std::max(peaks.graphs[s], ++graphs[s]);
      if (action.kind == Kind::B || action.kind == Kind::W) {
        --live[s];
        --graphs[s];
      }
    }
  }
  return peaks;
}

}  // namespace

absl::Status verify(const Layout& layout) {
  if (layout.stages < 1) {
    return InvalidArgumentError(StrFormat("the layout has %d stages: give it at least 1", layout.stages));
  }
  if (layout.micro_batches < 1) {
    return InvalidArgumentError(StrFormat("the layout has %d micro-batches: give it at least 1", layout.micro_batches));
  }
  if (static_cast<std::int64_t>(layout.stages) * layout.micro_batches > kMostCells) {
    return InvalidArgumentError(
        StrFormat("the layout has %d stages and %d micro-batches: use at most %d cells (stages times micro-batches)",
                  layout.stages, layout.micro_batches, kMostCells));
  }
  if (layout.placement.size() != static_cast<std::size_t>(layout.stages)) {
    return InvalidArgumentError(
        StrFormat("the placement has %d entries, but the layout has %d stages: give one worker per stage",
                  layout.placement.size(), layout.stages));
  }
  std::vector<bool> used(layout.stages, false);
  for (int stage = 0; stage < layout.stages; ++stage) {
    const int worker = layout.placement[stage];
    if (worker < 0 || worker >= layout.stages) {
      return InvalidArgumentError(StrFormat("stage %d is placed on worker %d: with %d stages, use workers 0..%d", stage,
                                            worker, layout.stages, layout.stages - 1));
    }
    used[worker] = true;
  }
  for (int worker = 0; worker < layout.workers(); ++worker) {
    if (!used[worker]) {
      return InvalidArgumentError(StrFormat(
          "worker %d has no stage, but worker %d has: number the workers without gaps", worker, layout.workers() - 1));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<Peaks> verify(const Layout& layout, const std::vector<Edge>& edges, const Schedule& schedule) {
  if (const auto status = verify(layout); !status.ok()) return status;
  if (const auto status = verify_edges(layout, edges); !status.ok()) return status;
  const auto cells = locate(layout, schedule);
  if (!cells.ok()) return cells.status();
  const bool has_backward = std::any_of(cells->begin(), cells->end(), [](const Places& c) { return c.has_backward(); });
  for (int stage = 0; stage < layout.stages; ++stage) {
    for (int m = 0; m < layout.micro_batches; ++m) {
      const Places& cell = (*cells)[static_cast<std::size_t>(stage) * layout.micro_batches + m];
      if (const auto status = verify_cell(stage, m, cell, has_backward); !status.ok()) return status;
    }
  }
  if (const auto status = verify_progress(layout, edges, schedule); !status.ok()) return status;
  return count(layout, schedule, *cells, has_backward);
}

}  // namespace gpipe
