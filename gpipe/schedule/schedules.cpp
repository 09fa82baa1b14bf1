#include "gpipe/schedules.h"

#include <algorithm>
#include <cstddef>
#include <stdexcept>
#include <utility>

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "gpipe/schedule/controllable_memory.h"
#include "gpipe/schedule/interleaved.h"
#include "gpipe/schedule/list_scheduler.h"
#include "gpipe/schedule/v_schedules.h"
#include "gpipe/schedule/verifier.h"
#include "gpipe/schedule/zero_bubble.h"

namespace gpipe {
namespace {

// A layout where stage s is on worker s mod p, with the same number of stages on each worker.
bool is_looped(const Layout& layout) {
  return layout.stages % layout.workers() == 0 && layout.placement == looped_placement(layout.workers(), layout.stages);
}

std::vector<int> loops(int stages, int stages_per_worker) {
  if (stages_per_worker < 1) {
    throw std::invalid_argument(
        absl::StrFormat("[gpipe] stages_per_worker must be positive, but is %d", stages_per_worker));
  }
  if (stages % stages_per_worker != 0) {
    throw std::invalid_argument(absl::StrFormat(
        "[gpipe] balance has %d stages, which stages_per_worker = %d does not divide", stages, stages_per_worker));
  }
  return looped_placement(stages / stages_per_worker, stages);
}

std::vector<int> v(int stages, int stages_per_worker) {
  if (stages_per_worker != 1 && stages_per_worker != 2) {
    throw std::invalid_argument(absl::StrFormat(
        "[gpipe] a V placement has two stages per worker, but stages_per_worker is %d", stages_per_worker));
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
  return layout.stages % 2 == 0 && layout.placement == v_placement(layout.stages)
             ? ""
             : "stages s and 2p - 1 - s on worker s of p (the V placement)";
}

Schedule fill_and_drain(const Layout& layout) { return fill_drain(layout, Checkpoint::kNever); }

Schedule one_f_one_b(const Layout& layout) {
  const int micro_batches = layout.micro_batches;
  Schedule lists(layout.stages);
  for (int s = 0; s < layout.stages; ++s) {
    const int warm_up = std::min(micro_batches, layout.stages - s);
    for (int m = 0; m < warm_up; ++m) lists[s].push_back({Kind::F, s, m});
    for (int m = 0; m < micro_batches; ++m) {
      lists[s].push_back({Kind::B, s, m});
      if (warm_up + m < micro_batches) lists[s].push_back({Kind::F, s, warm_up + m});
    }
  }
  return lists;
}

constexpr ScheduleRule kRules[] = {
    {kFillAndDrain, "all forwards, then all backwards, last micro-batch first (GPipe, arXiv:1811.06965)", loops,
     fits_any_layout, fill_and_drain},
    {"1f1b", "one forward, then one backward: at most p of m micro-batches in memory (PipeDream, arXiv:2006.09503)",
     loops, needs_one_stage_per_worker, one_f_one_b},
    {"looped_bfs", "gpipe with several stages per worker: a smaller bubble (Breadth-First, arXiv:2211.05953)", loops,
     needs_loops, fill_and_drain},
    {"interleaved_1f1b", "1f1b with several stages per worker: a smaller bubble (Megatron-LM, arXiv:2104.04473)", loops,
     needs_loops, interleaved_1f1b},
    {"zb_h1",
     "1f1b with split backwards: a third of the bubble, p cells on each worker (Zero Bubble, arXiv:2401.10241)", loops,
     needs_one_stage_per_worker, zb_h1},
    {"zb_h2", "no idle time after a worker's first action, but 2p - 1 cells on each (Zero Bubble, arXiv:2401.10241)",
     loops, needs_one_stage_per_worker, zb_h2},
    {"interleaved_zb", "interleaved_1f1b with split backwards: a smaller bubble (Zero Bubble, arXiv:2401.10241)", loops,
     needs_loops, interleaved_zb},
    {"zb_v", "zb_h2's idle time in zb_h1's memory, with two stages per worker (Zero Bubble, arXiv:2401.10241)", v,
     needs_v, zb_v},
    {"v_half", "half the memory of 1f1b's first worker (Controllable Memory, arXiv:2405.15362)", v, needs_v, v_half},
    {"v_min", "a third of the memory of 1f1b's first worker (Controllable Memory, arXiv:2405.15362)", v, needs_v,
     v_min},
    {"dualpipe_v", "forwards and backwards alternate, to overlap communication (DeepSeek-V3, arXiv:2412.19437)", v,
     needs_v, dualpipe_v},
    {"greedy", "each worker runs what it can, p micro-batches in flight: a small bubble on any placement", loops,
     fits_any_layout, greedy},
};

}  // namespace

bool fills_and_drains(std::string_view name) {
  const auto is_it = [&](const auto& rule) { return rule.name == name && rule.generate == fill_and_drain; };
  return std::any_of(std::begin(kRules), std::end(kRules), is_it);
}

std::string too_few_stages(std::string_view name, int workers, int stages) {
  if (!name.starts_with("interleaved_") || stages > workers) return "";
  return absl::StrFormat(
      "schedule '%s' needs several stages per worker, but there are %d for %d; set stages_per_worker, or use '%s'",
      std::string(name), stages, workers, name == "interleaved_zb" ? "zb_h1" : "1f1b");
}

std::vector<int> looped_placement(int workers, int stages) {
  if (workers < 1 || stages < 0) {
    throw std::invalid_argument(absl::StrFormat("cannot place %d stages on %d workers", stages, workers));
  }
  std::vector<int> placement(stages);
  for (int s = 0; s < stages; ++s) placement[s] = s % workers;
  return placement;
}

std::vector<int> v_placement(int stages) {
  if (stages < 0 || stages % 2 != 0) {
    throw std::invalid_argument(
        absl::StrFormat("[gpipe] a V placement has two stages per worker, but there are %d stages", stages));
  }
  std::vector<int> placement(stages);
  for (int s = 0; s < stages; ++s) placement[s] = std::min(s, stages - 1 - s);
  return placement;
}

std::span<const ScheduleRule> schedule_rules() { return kRules; }

const ScheduleRule& schedule_rule(std::string_view name) {
  const auto found =
      std::find_if(std::begin(kRules), std::end(kRules), [&](const auto& it) { return it.name == name; });
  if (found != std::end(kRules)) return *found;
  const auto names = absl::StrJoin(kRules, ", ", [](std::string* out, const ScheduleRule& it) { *out += it.name; });
  throw std::invalid_argument(
      absl::StrFormat("[gpipe] unknown schedule '%s'; choose one of %s", std::string(name), names));
}

Schedule make_schedule(std::string_view name, const Layout& layout, Checkpoint checkpoint) {
  const auto& rule = schedule_rule(name);
  if (const auto status = verify(layout); !status.ok()) throw std::invalid_argument(std::string(status.message()));
  if (const auto needed = rule.misfit(layout); !needed.empty()) {
    throw std::invalid_argument(
        absl::StrFormat("[gpipe] schedule '%s' needs %s, but the layout has %d stages on workers %s", std::string(name),
                        needed, layout.stages, absl::StrJoin(layout.placement, ", ")));
  }
  return with_recomputes(rule.generate(layout), checkpoint, layout.micro_batches);
}

}  // namespace gpipe
