#include "gpipe/schedule/v_schedules.h"

#include <algorithm>
#include <array>
#include <deque>
#include <optional>

#include "gpipe/schedule/verifier.h"

namespace gpipe {
namespace {

// An action of a worker without its micro-batch: 0 is the worker's first stage, 1 its second.
struct Move {
  Kind kind = Kind::F;
  int which = 0;
};

constexpr Move kF0{Kind::F, 0}, kF1{Kind::F, 1};
constexpr Move kB0{Kind::B, 0}, kB1{Kind::B, 1};
constexpr Move kI0{Kind::I, 0}, kI1{Kind::I, 1};
constexpr Move kW0{Kind::W, 0}, kW1{Kind::W, 1};

// Writes the list of one worker. Each action is for the next micro-batch of its kind and stage. The rules need a least
// number of micro-batches. Those that the layout does not have are left out, which cannot cause a deadlock.
class ListWriter {
 public:
  ListWriter(const Layout& layout, int worker)
      : micro_batches_(layout.micro_batches), stages_{worker, layout.stages - 1 - worker} {}

  void add(int times, std::initializer_list<Move> moves) {
    for (int i = 0; i < times; ++i) {
      for (const Move move : moves) add(move);
    }
  }

  void add(Move move) {
    if (move.kind == Kind::I) pending_.push_back(move.which);
    if (move.kind == Kind::W) pending_.erase(std::find(pending_.begin(), pending_.end(), move.which));
    // The backwards of a stage are counted together.
    const int m = next_[move.which][static_cast<std::size_t>(move.kind == Kind::B ? Kind::I : move.kind)]++;
    if (move.kind == Kind::B) ++next_[move.which][static_cast<std::size_t>(Kind::W)];
    if (m < micro_batches_) list_.push_back({move.kind, stages_[move.which], m});
  }

  // Adds the W of the earliest I that has none yet. Does nothing if there is none.
  void add_pending() {
    if (!pending_.empty()) add({Kind::W, pending_.front()});
  }

  int pending() const { return static_cast<int>(pending_.size()); }
  int pending(int which) const { return static_cast<int>(std::count(pending_.begin(), pending_.end(), which)); }
  int forwards(int which) const { return next_[which][static_cast<std::size_t>(Kind::F)]; }

  std::vector<Action> take() && { return std::move(list_); }

 private:
  int micro_batches_;
  std::array<int, 2> stages_;
  std::array<std::array<int, 5>, 2> next_ = {};  // micro-batch, by stage and kind
  std::deque<int> pending_;                      // the stages of the I's without W
  std::vector<Action> list_;
};

std::vector<Action> zb_v_list(const Layout& layout, int r) {
  const int p = layout.workers();
  const int n = std::max(layout.micro_batches, 2 * p - 1);
  ListWriter list(layout, r);
  list.add(2 * (p - r) - 1, {kF0});
  list.add(r, {kF1, kF0});
  list.add(p - r, {kF1, kI1, kW1});
  while (list.forwards(1) < n) {
    if (list.forwards(0) < n) list.add(kF0);
    list.add(1, {kI0, kW0, kF1, kI1, kW1});
  }
  list.add(r, {kI0, kI1});
  list.add(p - r, {kI0, kW0});
  list.add(list.pending(1), {kW1});
  list.add(list.pending(0), {kW0});
  return std::move(list).take();
}

std::vector<Action> dualpipe_v_list(const Layout& layout, int r) {
  const int p = layout.workers();
  const int n = std::max(layout.micro_batches, 2 * p);
  const int later = p - r - 1;  // workers after this one
  ListWriter list(layout, r);
  list.add(2 * later, {kF0});
  list.add(r + 1, {kF0, kF1});
  list.add(later, {kI1, kW1, kF1});
  list.add(n - 2 * p + r + 1, {kF0, kB1, kF1, kB0});
  list.add(later, {kB1, kF1, kB0});
  // The first half of these backwards are whole, the others split.
  for (int i = 0; i < 2 * (r + 1); ++i) {
    const int which = 1 - i % 2;
    list.add({i < r + 1 ? Kind::B : Kind::I, which});
  }
  for (int i = 0; i < later; ++i) {
    list.add_pending();
    list.add(kI0);
  }
  while (list.pending() > 0) list.add_pending();
  return std::move(list).take();
}

// The slots of micro-batch 0's F and I on one worker's stages. A slot is the time of one action.
struct Pattern {
  int first_forward;
  int second_forward;
  int second_backward;
  int first_backward;
};

// Micro-batch k runs k periods after micro-batch 0. A period has a slot for F, I and W of both stages.
constexpr int kPeriod = 6;

// The F and I of all workers in slots. A slot without either runs the W that has waited longest, if there is one.
class Slots {
 public:
  Slots(const Layout& layout, const std::vector<Pattern>& patterns)
      : layout_(layout), workers_(layout.workers()), forwards_(layout.stages), backwards_(layout.stages) {
    for (int worker = 0; worker < layout.workers(); ++worker) {
      const int second = layout.stages - 1 - worker;
      const auto [f0, f1, i1, i0] = patterns[worker];
      for (int m = 0; m < layout.micro_batches; ++m) {
        place({Kind::F, worker, m}, f0 + m * kPeriod);
        place({Kind::F, second, m}, f1 + m * kPeriod);
        place({Kind::I, second, m}, i1 + m * kPeriod);
        place({Kind::I, worker, m}, i0 + m * kPeriod);
      }
    }
  }

  // Moves every action that begins before `steady` or after `cool_down` to the first free slot after the actions that
  // it needs with which its worker holds `most_cells` at most. Leaves it where it is if there is none.
  void compact(int steady, int cool_down, int most_cells) {
    std::size_t slots = 0;
    for (const Worker& worker : workers_) slots = std::max(slots, worker.size());
    for (int slot = 0; slot < static_cast<int>(slots); ++slot) {
      if (slot >= steady && slot <= cool_down) continue;
      for (Worker& worker : workers_) {
        if (slot < static_cast<int>(worker.size()) && worker[slot]) move_forward(worker, slot, most_cells);
      }
    }
  }

  Schedule lists() const {
    Schedule lists;
    for (const Worker& worker : workers_) lists.push_back(list(worker));
    return lists;
  }

 private:
  using Worker = std::vector<std::optional<Action>>;  // by slot
  using Times = std::vector<std::vector<int>>;        // slots by stage and micro-batch

  Times& times(Kind kind) { return kind == Kind::F ? forwards_ : backwards_; }

  void place(const Action& action, int slot) {
    Worker& worker = workers_[layout_.placement[action.stage]];
    if (worker.size() <= static_cast<std::size_t>(slot)) worker.resize(slot + 1);
    worker[slot] = action;
    times(action.kind)[action.stage].push_back(slot);
  }

  void move_forward(Worker& worker, int slot, int most_cells) {
    const Action action = *worker[slot];
    for (int earlier = needed(action) + 1; earlier < slot; ++earlier) {
      if (worker[earlier]) continue;
      std::swap(worker[earlier], worker[slot]);
      if (peak_cells(list(worker)) <= most_cells) {
        times(action.kind)[action.stage][action.micro_batch] = earlier;
        return;
      }
      std::swap(worker[earlier], worker[slot]);
    }
  }

  // The last slot of the actions that must precede `action`; -1 if there are none.
  int needed(const Action& action) {
    const auto [kind, stage, m] = action;
    int latest = m == 0 ? -1 : times(kind)[stage][m - 1];
    if (kind == Kind::F && stage > 0) latest = std::max(latest, forwards_[stage - 1][m]);
    if (kind == Kind::I) {
      const bool last = stage == layout_.stages - 1;
      latest = std::max(latest, last ? forwards_[stage][m] : backwards_[stage + 1][m]);
    }
    return latest;
  }

  static std::vector<Action> list(const Worker& worker) {
    std::vector<Action> list;
    std::deque<Action> pending;
    for (const auto& slot : worker) {
      if (slot) {
        list.push_back(*slot);
        if (slot->kind == Kind::I) pending.push_back({Kind::W, slot->stage, slot->micro_batch});
      } else if (!pending.empty()) {
        list.push_back(pending.front());
        pending.pop_front();
      }
    }
    list.insert(list.end(), pending.begin(), pending.end());
    return list;
  }

  const Layout& layout_;
  std::vector<Worker> workers_;
  Times forwards_;
  Times backwards_;
};

// Repeats the pattern, then shortens warm-up and cool-down as far as the memory allows. `gap` separates F and I.
Schedule repeat(const Layout& layout, const std::vector<Pattern>& patterns, int gap, int most_cells) {
  Slots slots(layout, patterns);
  slots.compact(patterns[0].first_backward + gap, (layout.micro_batches - 1) * kPeriod + patterns[0].first_forward,
                most_cells);
  return slots.lists();
}

Schedule of_workers(const Layout& layout, std::vector<Action> (*list)(const Layout& layout, int worker)) {
  Schedule lists;
  for (int worker = 0; worker < layout.workers(); ++worker) lists.push_back(list(layout, worker));
  return lists;
}

}  // namespace

Schedule zb_v(const Layout& layout) { return of_workers(layout, zb_v_list); }
Schedule dualpipe_v(const Layout& layout) { return of_workers(layout, dualpipe_v_list); }

Schedule v_half(const Layout& layout) {
  const int p = layout.workers();
  const int gap = p % 2 == 0 ? 3 : 0;  // keeps forwards and backwards in different slots
  std::vector<Pattern> patterns;
  for (int r = 0; r < p; ++r) patterns.push_back({2 * r, 3 * p - 2 - r, 3 * p - 1 + gap + 2 * r, 6 * p - 2 + gap - r});
  return repeat(layout, patterns, gap, 2 * ((p + 2) / 2));
}

Schedule v_min(const Layout& layout) {
  const int p = layout.workers();
  const int gap = p % 3 == 0 ? 2 : 0;  // keeps forwards and backwards in different slots
  std::vector<Pattern> patterns;
  for (int r = 0; r < p; ++r) patterns.push_back({r, 2 * p - 1 - r, 2 * p + gap + r, 4 * p + gap - 1 - r});
  return repeat(layout, patterns, gap, 2 * ((p + 4) / 3));
}

}  // namespace gpipe
