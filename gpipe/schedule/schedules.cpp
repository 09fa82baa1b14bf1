#include "gpipe/schedules.h"

#include <algorithm>

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "gpipe/base/checks.h"
#include "gpipe/schedule/merged.h"
#include "gpipe/schedule/v_schedules.h"
#include "gpipe/schedule/verifier.h"

namespace gpipe {
namespace {

// A layout where stage s is on worker s mod p, with the same number of stages on each worker.
bool is_looped(const Layout& layout) {
  return layout.stages % layout.workers() == 0 && layout.placement == looped_placement(layout.workers(), layout.stages);
}

std::vector<int> loops(int stages, int stages_per_worker) {
  if (stages_per_worker < 1) refuse_argument("stages_per_worker must be positive, but is ", stages_per_worker);
  if (stages % stages_per_worker != 0) {
    refuse_argument("balance has ", stages, " stages, which stages_per_worker = ", stages_per_worker,
                    " does not divide");
  }
  return looped_placement(stages / stages_per_worker, stages);
}

std::vector<int> v(int stages, int stages_per_worker) {
  if (stages_per_worker != 1 && stages_per_worker != 2) {
    refuse_argument("a V placement has two stages per worker, but stages_per_worker is ", stages_per_worker);
  }
  return v_placement(stages);
}

std::string fits_any_layout(const Layout&) { return ""; }

std::string needs_one_stage_per_worker(const Layout& layout) {
  return is_looped(layout) && layout.stages == layout.workers() ? "" : "stage s on worker s, one stage per worker";
}

std::string needs_loops(const Layout& layout) {
  return is_looped(layout) ? "" : "stage s on worker s mod the number of workers, the same number of stages on each";
}

std::string needs_v(const Layout& layout) {
  return is_v(layout) ? "" : "stages s and 2p - 1 - s on worker s of p (the V placement)";
}

/// The stages that a rule schedules. Those of a V are a V, except that all on one worker are one stage for other rules.
Merged merge_for(const ScheduleRule& rule, const Layout& layout) {
  const auto merged = merge_segments(layout);
  const bool is_one = merged.layout.stages == 1 && rule.misfit_of_stages(merged.layout).empty();
  return is_one ? merged : merge_as_v(layout).value_or(merged);
}

Schedule fill_and_drain(const Layout& layout) { return fill_drain(layout, Checkpoint::kNever); }

// The sizes of the rounds of interleaved schedules: they differ by one at most, larger ones first. Others can deadlock.
std::vector<int> round_sizes(int workers, int micro_batches) {
  const int rounds = std::max(1, micro_batches / workers);
  std::vector<int> sizes(rounds, micro_batches / rounds);
  for (int i = 0; i < micro_batches % rounds; ++i) ++sizes[i];
  return sizes;
}

// The cells of one worker, in the order of its forwards or of its backwards. The worker runs a round of about p
// micro-batches through one of its stages, then through the next.
std::vector<Action> in_rounds(const Layout& layout, int worker, Kind kind) {
  const int workers = layout.workers();
  const int loops = layout.stages / workers;
  std::vector<Action> actions;
  int first = 0;
  for (const int size : round_sizes(workers, layout.micro_batches)) {
    for (int i = 0; i < loops; ++i) {
      const int loop = kind == Kind::F ? i : loops - 1 - i;
      for (int m = first; m < first + size; ++m) actions.push_back({kind, loop * workers + worker, m});
    }
    first += size;
  }
  return actions;
}

// Returns lists of forwards, then one forward and one backward in turn. `slope` is the difference between neighbouring
// workers in the number of forwards before the first backward. REQUIRES: is_looped().
Schedule alternate(const Layout& layout, int slope, bool split = false) {
  const int workers = layout.workers();
  const auto loops = static_cast<std::size_t>(layout.stages / workers);
  const int round = round_sizes(workers, layout.micro_batches).front();
  Schedule lists(workers);
  for (int worker = 0; worker < workers; ++worker) {
    const auto forwards = in_rounds(layout, worker, Kind::F);
    const auto backwards = in_rounds(layout, worker, split ? Kind::I : Kind::B);
    const auto weights = split ? in_rounds(layout, worker, Kind::W) : std::vector<Action>();
    const auto first = std::min(forwards.size(), (loops - 1) * round + slope * (workers - 1 - worker));
    const auto lag = std::min(weights.size(), static_cast<std::size_t>(slope) * worker);  // of W behind I
    auto& list = lists[worker];
    list.assign(forwards.begin(), forwards.begin() + static_cast<std::ptrdiff_t>(first));
    for (std::size_t k = 0; k < backwards.size(); ++k) {
      if (first + k < forwards.size()) list.push_back(forwards[first + k]);
      list.push_back(backwards[k]);
      if (split && k >= lag) list.push_back(weights[k - lag]);
    }
    list.insert(list.end(), weights.end() - static_cast<std::ptrdiff_t>(lag), weights.end());
  }
  return lists;
}

// With v stages per worker and rounds of at most g micro-batches, worker r holds at most (v - 1) g + 2 (p - 1 - r) + 1
// cells in interleaved_1f1b, each (v - 1) g + p in interleaved_zb, min(m, p) in zb_h1 and min(m, 2p - 1) in zb_h2.
Schedule one_f_one_b(const Layout& layout) { return alternate(layout, 1); }
Schedule interleaved_1f1b(const Layout& layout) { return alternate(layout, 2); }
Schedule split_1f1b(const Layout& layout) { return alternate(layout, 1, /*split=*/true); }
Schedule zb_h2(const Layout& layout) { return alternate(layout, 2, /*split=*/true); }

constexpr ScheduleRule kRules[] = {
    {kFillAndDrain, "all forwards, then all backwards, last micro-batch first (GPipe, arXiv:1811.06965)", loops, false,
     fits_any_layout, fill_and_drain},
    {"1f1b", "one forward, then one backward: at most p of m micro-batches in memory (PipeDream, arXiv:2006.09503)",
     loops, false, needs_one_stage_per_worker, one_f_one_b},
    {"looped_bfs", "gpipe with several stages per worker: a smaller bubble (Breadth-First, arXiv:2211.05953)", loops,
     true, needs_loops, fill_and_drain},
    {"interleaved_1f1b", "1f1b with several stages per worker: a smaller bubble (Megatron-LM, arXiv:2104.04473)", loops,
     true, needs_loops, interleaved_1f1b},
    {"zb_h1",
     "1f1b with split backwards: a third of the bubble, p cells on each worker (Zero Bubble, arXiv:2401.10241)", loops,
     false, needs_one_stage_per_worker, split_1f1b},
    {"zb_h2", "no idle time after a worker's first action, but 2p - 1 cells on each (Zero Bubble, arXiv:2401.10241)",
     loops, false, needs_one_stage_per_worker, zb_h2},
    {"interleaved_zb", "interleaved_1f1b with split backwards: a smaller bubble (Zero Bubble, arXiv:2401.10241)", loops,
     true, needs_loops, split_1f1b},
    {"zb_v", "zb_h2's idle time in zb_h1's memory, with two stages per worker (Zero Bubble, arXiv:2401.10241)", v,
     false, needs_v, zb_v},
    {"v_half", "half the memory of 1f1b's first worker (Controllable Memory, arXiv:2405.15362)", v, false, needs_v,
     v_half},
    {"v_min", "a third of the memory of 1f1b's first worker (Controllable Memory, arXiv:2405.15362)", v, false, needs_v,
     v_min},
    {"dualpipe_v", "forwards and backwards alternate, to overlap communication (DeepSeek-V3, arXiv:2412.19437)", v,
     false, needs_v, dualpipe_v},
};

}  // namespace

std::string ScheduleRule::misfit(const Layout& layout) const {
  return misfit_of_stages(merge_for(*this, layout).layout);
}

Schedule ScheduleRule::generate(const Layout& layout) const {
  const auto [merged, firsts] = merge_for(*this, layout);
  return with_segments(generate_of_stages(merged), firsts);
}

Schedule fill(const Layout& layout) {
  verify(layout);
  const auto [merged, firsts] = merge_for(schedule_rule(kFillAndDrain), layout);
  Schedule lists(merged.workers());
  for (int stage = 0; stage < merged.stages; ++stage) {
    for (int m = 0; m < merged.micro_batches; ++m) lists[merged.placement[stage]].push_back({Kind::F, stage, m});
  }
  return with_segments(lists, firsts);
}

Schedule fill_drain(const Layout& layout, const Checkpoints& checkpoints) {
  Schedule lists = fill(layout);
  for (auto& list : lists) {
    const std::vector<Action> forwards = list;
    for (auto forward = forwards.rbegin(); forward != forwards.rend(); ++forward) {
      list.push_back({Kind::B, forward->stage, forward->micro_batch});
    }
  }
  return with_recomputes(std::move(lists), checkpoints, layout);
}

Schedule with_recomputes(Schedule schedule, const Checkpoints& checkpoints, const Layout& layout) {
  checkpoints.check(layout.stages);
  const auto recomputes = [](const auto& list) {
    return std::ranges::find(list, Kind::R, &Action::kind) != list.end();
  };
  if (std::ranges::any_of(schedule, recomputes)) return schedule;
  const auto in_flight = most_cells(schedule, layout.stages);
  for (auto& list : schedule) {
    std::vector<Action> with;
    for (const Action& action : list) {
      const auto [kind, stage, m] = action;
      const bool begins_backward = kind == Kind::B || kind == Kind::I;
      const bool exists = stage >= 0 && stage < layout.stages;  // the schedule may not be verified yet
      if (begins_backward && exists &&
          checkpoints.of(stage).recomputes(m, layout.micro_batches, std::max(1, in_flight[stage]))) {
        with.push_back({Kind::R, stage, m});
      }
      with.push_back(action);
    }
    list = std::move(with);
  }
  return schedule;
}

bool fills_and_drains(std::string_view name) {
  return std::ranges::any_of(kRules,
                             [&](auto& it) { return it.name == name && it.generate_of_stages == fill_and_drain; });
}

std::string too_few_stages(std::string_view name, const std::vector<int>& placement) {
  const Layout layout{static_cast<int>(placement.size()), 1, placement};
  const int stages = layout.workers() == 1 ? layout.stages : merge_segments(layout).layout.stages;
  if (!name.starts_with("interleaved_") || stages > layout.workers()) return "";
  return absl::StrFormat(
      "schedule '%s' needs several stages per worker, but there are %d for %d; set placement, such as 0, 1, 0, 1, or "
      "use '%s'",
      std::string(name), stages, layout.workers(), name == "interleaved_zb" ? "zb_h1" : "1f1b");
}

std::vector<int> looped_placement(int workers, int stages) {
  if (workers < 1 || stages < 0) refuse_argument("cannot place ", stages, " stages on ", workers, " workers");
  std::vector<int> placement(stages);
  for (int s = 0; s < stages; ++s) placement[s] = s % workers;
  return placement;
}

std::vector<int> v_placement(int stages) {
  if (stages < 0 || stages % 2 != 0) {
    refuse_argument("a V placement has two stages per worker, but there are ", stages, " stages");
  }
  std::vector<int> placement(stages);
  for (int s = 0; s < stages; ++s) placement[s] = std::min(s, stages - 1 - s);
  return placement;
}

std::span<const ScheduleRule> schedule_rules() { return kRules; }

const ScheduleRule& schedule_rule(std::string_view name) {
  if (const auto* found = std::ranges::find(kRules, name, &ScheduleRule::name); found != std::end(kRules)) {
    return *found;
  }
  const auto names = absl::StrJoin(kRules, ", ", [](std::string* out, const ScheduleRule& it) { *out += it.name; });
  refuse_argument("unknown schedule '", std::string(name), "'; choose one of ", names, ", or give a file as @FILE");
}

Schedule make_schedule(std::string_view name, const Layout& layout, const Checkpoints& checkpoints) {
  const auto& rule = schedule_rule(name);
  verify(layout);
  if (const auto needed = rule.misfit(layout); !needed.empty()) {
    refuse_argument("schedule '", std::string(name), "' needs ", needed, ", but the layout has ", layout.stages,
                    " stages on workers ", absl::StrJoin(layout.placement, ", "));
  }
  return with_recomputes(rule.generate(layout), checkpoints, layout);
}

}  // namespace gpipe
