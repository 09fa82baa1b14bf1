#include "gpipe/schedule/interleaved.h"

#include <algorithm>
#include <cstddef>
#include <vector>

namespace gpipe {
namespace {

// The sizes of the rounds. Sizes differ by one at most, larger ones first, because other sizes can deadlock.
std::vector<int> round_sizes(int workers, int micro_batches) {
  const int rounds = std::max(1, micro_batches / workers);
  std::vector<int> sizes(rounds, micro_batches / rounds);
  for (int i = 0; i < micro_batches % rounds; ++i) ++sizes[i];
  return sizes;
}

// The cells of one worker, in the order of its forwards or of its backwards: rounds ascending, and in each round the
// worker's stages ascending or descending.
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

// The number of forwards before a worker's first backward. `slope` is the difference between neighbouring workers.
std::size_t warm_up(const Layout& layout, int worker, int slope) {
  const int workers = layout.workers();
  const auto loops = static_cast<std::size_t>(layout.stages / workers);
  return std::min(loops * layout.micro_batches,
                  (loops - 1) * round_sizes(workers, layout.micro_batches).front() + slope * (workers - 1 - worker));
}

}  // namespace

Schedule interleaved_1f1b(const Layout& layout) {
  Schedule lists(layout.workers());
  for (int worker = 0; worker < layout.workers(); ++worker) {
    const auto forwards = in_rounds(layout, worker, Kind::F);
    const auto backwards = in_rounds(layout, worker, Kind::B);
    const auto first = warm_up(layout, worker, /*slope=*/2);
    auto& list = lists[worker];
    list.assign(forwards.begin(), forwards.begin() + static_cast<std::ptrdiff_t>(first));
    for (std::size_t k = 0; k < backwards.size(); ++k) {
      if (first + k < forwards.size()) list.push_back(forwards[first + k]);
      list.push_back(backwards[k]);
    }
  }
  return lists;
}

Schedule interleaved_zb(const Layout& layout) {
  Schedule lists(layout.workers());
  for (int worker = 0; worker < layout.workers(); ++worker) {
    const auto forwards = in_rounds(layout, worker, Kind::F);
    const auto inputs = in_rounds(layout, worker, Kind::I);
    const auto weights = in_rounds(layout, worker, Kind::W);
    const auto first = warm_up(layout, worker, /*slope=*/1);
    const auto lag = std::min(weights.size(), static_cast<std::size_t>(worker));  // of W behind I
    auto& list = lists[worker];
    list.assign(forwards.begin(), forwards.begin() + static_cast<std::ptrdiff_t>(first));
    for (std::size_t k = 0; k < inputs.size(); ++k) {
      if (first + k < forwards.size()) list.push_back(forwards[first + k]);
      list.push_back(inputs[k]);
      if (k >= lag) list.push_back(weights[k - lag]);
    }
    list.insert(list.end(), weights.end() - static_cast<std::ptrdiff_t>(lag), weights.end());
  }
  return lists;
}

}  // namespace gpipe
