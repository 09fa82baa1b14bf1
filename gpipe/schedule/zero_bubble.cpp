#include "gpipe/schedule/zero_bubble.h"

#include <algorithm>

namespace gpipe {
namespace {

// Returns the list of one stage: `warm_up` forwards, then one I, one W and one F in turn. W stays `lag` micro-batches
// behind I.
std::vector<Action> split_1f1b(int stage, int micro_batches, int warm_up, int lag) {
  std::vector<Action> list;
  const int first = std::min(micro_batches, warm_up);
  for (int m = 0; m < first; ++m) list.push_back({Kind::F, stage, m});
  for (int m = 0; m < micro_batches; ++m) {
    list.push_back({Kind::I, stage, m});
    if (m >= lag) list.push_back({Kind::W, stage, m - lag});
    if (first + m < micro_batches) list.push_back({Kind::F, stage, first + m});
  }
  for (int m = std::max(0, micro_batches - lag); m < micro_batches; ++m) list.push_back({Kind::W, stage, m});
  return list;
}

}  // namespace

Schedule zb_h1(const Layout& layout) {
  Schedule lists;
  for (int s = 0; s < layout.stages; ++s) {
    lists.push_back(split_1f1b(s, layout.micro_batches, /*warm_up=*/layout.stages - s, /*lag=*/s));
  }
  return lists;
}

Schedule zb_h2(const Layout& layout) {
  Schedule lists;
  for (int s = 0; s < layout.stages; ++s) {
    lists.push_back(split_1f1b(s, layout.micro_batches, /*warm_up=*/2 * (layout.stages - s) - 1, /*lag=*/2 * s));
  }
  return lists;
}

}  // namespace gpipe
