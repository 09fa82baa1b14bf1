#include "gpipe/schedule/v_schedules.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <deque>
#include <initializer_list>
#include <utility>
#include <vector>

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
  // The number of forwards so far.
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

}  // namespace

Schedule zb_v(const Layout& layout) {
  Schedule lists;
  for (int worker = 0; worker < layout.workers(); ++worker) lists.push_back(zb_v_list(layout, worker));
  return lists;
}

Schedule dualpipe_v(const Layout& layout) {
  Schedule lists;
  for (int worker = 0; worker < layout.workers(); ++worker) lists.push_back(dualpipe_v_list(layout, worker));
  return lists;
}

}  // namespace gpipe
