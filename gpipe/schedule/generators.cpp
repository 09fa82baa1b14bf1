#include "gpipe/schedule/generators.h"

#include "gpipe/schedule/verifier.h"

namespace gpipe {

Schedule fill(const Layout& layout) {
  verify(layout);
  Schedule lists(layout.workers());
  for (int stage = 0; stage < layout.stages; ++stage) {
    auto& list = lists[layout.placement[stage]];
    for (int m = 0; m < layout.micro_batches; ++m) list.push_back({Kind::F, stage, m});
  }
  return lists;
}

Schedule fill_drain(const Layout& layout, Checkpoint checkpoint) {
  Schedule lists = fill(layout);
  for (int stage = layout.stages; stage-- > 0;) {
    auto& list = lists[layout.placement[stage]];
    for (int m = layout.micro_batches; m-- > 0;) list.push_back({Kind::B, stage, m});
  }
  return with_recomputes(std::move(lists), checkpoint, layout.micro_batches);
}

Schedule with_recomputes(Schedule schedule, Checkpoint checkpoint, int micro_batches) {
  for (auto& list : schedule) {
    std::vector<Action> with;
    for (const Action& action : list) {
      const bool begins_backward = action.kind == Kind::B || action.kind == Kind::I;
      if (begins_backward && recomputes(checkpoint, action.micro_batch, micro_batches)) {
        with.push_back({Kind::R, action.stage, action.micro_batch});
      }
      with.push_back(action);
    }
    list = std::move(with);
  }
  return schedule;
}

}  // namespace gpipe
