#include "gpipe/schedule/action.h"

#include <cstddef>

#include "absl/strings/str_format.h"

namespace gpipe {

char to_char(Kind kind) { return "FRBIW"[static_cast<std::size_t>(kind)]; }

std::string to_string(const Action& action) {
  return absl::StrFormat("%d%c%d", action.stage, to_char(action.kind), action.micro_batch);
}

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

std::map<std::string, Checkpoint> checkpoints() {
  std::map<std::string, Checkpoint> by_name;
  for (const auto checkpoint : {Checkpoint::kNever, Checkpoint::kExceptLast, Checkpoint::kAlways}) {
    by_name[to_string(checkpoint)] = checkpoint;
  }
  return by_name;
}

}  // namespace gpipe
