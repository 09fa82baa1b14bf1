#include "gpipe/schedule/controllable_memory.h"

#include <algorithm>
#include <cstddef>
#include <deque>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

namespace gpipe {
namespace {

// The slots of micro-batch 0's F and I on one worker's stages. A slot is the time of one action.
struct Pattern {
  int first_forward;
  int second_forward;
  int second_backward;
  int first_backward;
};

// Micro-batch k runs k periods after micro-batch 0. A period has a slot for F, I and W of both stages.
constexpr int kPeriod = 6;

// Places F and I in slots. A slot without either runs the W that has waited longest, if there is one.
class Slots {
 public:
  Slots(const Layout& layout, const std::vector<Pattern>& patterns) : layout_(layout), workers_(patterns.size()) {
    for (const Kind kind : {Kind::F, Kind::I}) times(kind).resize(layout.stages);
    for (int worker = 0; worker < layout.workers(); ++worker) {
      const int second = layout.stages - 1 - worker;
      for (int m = 0; m < layout.micro_batches; ++m) {
        const int start = m * kPeriod;
        place({Kind::F, worker, m}, start + patterns[worker].first_forward);
        place({Kind::F, second, m}, start + patterns[worker].second_forward);
        place({Kind::I, second, m}, start + patterns[worker].second_backward);
        place({Kind::I, worker, m}, start + patterns[worker].first_backward);
      }
    }
  }

  int time(const Action& action) const { return times(action.kind)[action.stage][action.micro_batch]; }

  // All F and I by time; at one time, by worker.
  std::vector<Action> actions() const {
    std::vector<std::tuple<int, int, Action>> sorted;
    for (std::size_t worker = 0; worker < workers_.size(); ++worker) {
      for (const auto& slot : workers_[worker]) {
        if (slot) sorted.emplace_back(time(*slot), static_cast<int>(worker), *slot);
      }
    }
    std::sort(sorted.begin(), sorted.end(), [](const auto& a, const auto& b) {
      return std::tie(std::get<0>(a), std::get<1>(a)) < std::tie(std::get<0>(b), std::get<1>(b));
    });
    std::vector<Action> result;
    for (const auto& [at, worker, action] : sorted) result.push_back(action);
    return result;
  }

  // Moves an action to the first free slot after those that it needs with which its worker holds `most_cells` at most.
  // Leaves it where it is if there is none.
  void move_forward(const Action& action, int most_cells) {
    auto& slots = workers_[layout_.placement[action.stage]];
    int& now = times(action.kind)[action.stage][action.micro_batch];
    for (int earlier = needed(action) + 1; earlier < now; ++earlier) {
      if (slots[earlier]) continue;
      std::swap(slots[earlier], slots[now]);
      if (peak_cells(slots) <= most_cells) {
        now = earlier;
        return;
      }
      std::swap(slots[earlier], slots[now]);
    }
  }

  Schedule lists() const {
    Schedule lists;
    for (const auto& slots : workers_) {
      auto& list = lists.emplace_back();
      std::deque<Action> pending;
      for (const auto& slot : slots) {
        if (slot) {
          list.push_back(*slot);
          if (slot->kind == Kind::I) pending.push_back({Kind::W, slot->stage, slot->micro_batch});
        } else if (!pending.empty()) {
          list.push_back(pending.front());
          pending.pop_front();
        }
      }
      list.insert(list.end(), pending.begin(), pending.end());
    }
    return lists;
  }

 private:
  using Worker = std::vector<std::optional<Action>>;  // by slot
  using Times = std::vector<std::vector<int>>;        // by stage and micro-batch

  const Times& times(Kind kind) const { return kind == Kind::F ? forwards_ : backwards_; }
  Times& times(Kind kind) { return kind == Kind::F ? forwards_ : backwards_; }

  void place(const Action& action, int slot) {
    auto& slots = workers_[layout_.placement[action.stage]];
    if (slots.size() <= static_cast<std::size_t>(slot)) slots.resize(slot + 1);
    slots[slot] = action;
    times(action.kind)[action.stage].push_back(slot);
  }

  // The last slot of the actions that must precede `action`; -1 if there are none.
  int needed(const Action& action) const {
    const auto [kind, stage, m] = action;
    int latest = m == 0 ? -1 : time({kind, stage, m - 1});
    if (kind == Kind::F && stage > 0) latest = std::max(latest, time({kind, stage - 1, m}));
    if (kind == Kind::I) {
      const bool last = stage == layout_.stages - 1;
      latest = std::max(latest, last ? time({Kind::F, stage, m}) : time({kind, stage + 1, m}));
    }
    return latest;
  }

  static int peak_cells(const Worker& slots) {
    int live = 0;
    int peak = 0;
    int pending = 0;  // W
    for (const auto& slot : slots) {
      if (!slot && pending > 0) {
        --pending;
        --live;
      }
      if (slot && slot->kind == Kind::F) peak = std::max(peak, ++live);
      if (slot && slot->kind == Kind::I) ++pending;
    }
    return peak;
  }

  const Layout& layout_;
  std::vector<Worker> workers_;
  Times forwards_;
  Times backwards_;
};

// Shortens warm-up and cool-down: all actions move forward as far as the memory allows, except the steady phase.
Schedule compact(const Layout& layout, const std::vector<Pattern>& patterns, int gap, int most_cells) {
  Slots slots(layout, patterns);
  const int steady = patterns[0].first_backward + gap;
  const int cool_down = (layout.micro_batches - 1) * kPeriod + patterns[0].first_forward;
  for (const Action& action : slots.actions()) {
    const int time = slots.time(action);
    if (time < steady || time > cool_down) slots.move_forward(action, most_cells);
  }
  return slots.lists();
}

}  // namespace

Schedule v_half(const Layout& layout) {
  const int p = layout.workers();
  const int gap = p % 2 == 0 ? 3 : 0;  // keeps forwards and backwards in different slots
  std::vector<Pattern> patterns;
  for (int r = 0; r < p; ++r) {
    patterns.push_back({2 * r, 3 * p - 2 - r, 3 * p - 1 + gap + 2 * r, 6 * p - 2 + gap - r});
  }
  return compact(layout, patterns, gap, 2 * ((p + 2) / 2));
}

Schedule v_min(const Layout& layout) {
  const int p = layout.workers();
  const int gap = p % 3 == 0 ? 2 : 0;  // keeps forwards and backwards in different slots
  std::vector<Pattern> patterns;
  for (int r = 0; r < p; ++r) patterns.push_back({r, 2 * p - 1 - r, 2 * p + gap + r, 4 * p + gap - 1 - r});
  return compact(layout, patterns, gap, 2 * ((p + 4) / 3));
}

}  // namespace gpipe
