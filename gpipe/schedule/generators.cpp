#include "gpipe/schedule/generators.h"

#include <stdexcept>
#include <string>

#include "gpipe/schedule/verifier.h"

namespace gpipe {
namespace {

bool recomputes(Checkpoint checkpoint, int micro_batch, int micro_batches) {
  switch (checkpoint) {
    case Checkpoint::kNever:
      return false;
    case Checkpoint::kExceptLast:
      return micro_batch + 1 < micro_batches;
    case Checkpoint::kAlways:
      break;
  }
  return true;
}

}  // namespace

Schedule fill(const Layout& layout) {
  if (const auto status = verify(layout); !status.ok()) throw std::invalid_argument(std::string(status.message()));
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
    for (int m = layout.micro_batches; m-- > 0;) {
      if (recomputes(checkpoint, m, layout.micro_batches)) list.push_back({Kind::R, stage, m});
      list.push_back({Kind::B, stage, m});
    }
  }
  return lists;
}

}  // namespace gpipe
