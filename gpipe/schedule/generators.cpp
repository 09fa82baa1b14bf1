#include "gpipe/schedule/generators.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>

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

std::string to_string(Checkpoint checkpoint) {
  switch (checkpoint) {
    case Checkpoint::kNever:
      return "never";
    case Checkpoint::kExceptLast:
      return "except_last";
    case Checkpoint::kAlways:
      break;
  }
  return "always";
}

std::map<std::string, Checkpoint> checkpoints() {
  std::map<std::string, Checkpoint> by_name;
  for (const auto checkpoint : {Checkpoint::kNever, Checkpoint::kExceptLast, Checkpoint::kAlways}) {
    by_name[to_string(checkpoint)] = checkpoint;
  }
  return by_name;
}

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

Program gpipe_program(int stages, int micro_batches, std::vector<Edge> edges, Checkpoint checkpoint, bool backward) {
  Layout layout{stages, micro_batches, std::vector<int>(std::clamp(stages, 0, kMostCells))};  // fill() refuses others
  std::iota(layout.placement.begin(), layout.placement.end(), 0);
  for (auto& edge : edges) edge.capacity = micro_batches;
  auto schedule = backward ? fill_drain(layout, checkpoint) : fill(layout);
  auto program = Program::make(std::move(layout), std::move(edges), std::move(schedule));
  if (!program.ok()) throw std::invalid_argument(std::string(program.status().message()));
  return *std::move(program);
}

}  // namespace gpipe
