#include "gpipe/schedule/action.h"

#include <cstddef>

#include "absl/strings/str_format.h"

namespace gpipe {

char to_char(Kind kind) { return "FRBIW"[static_cast<std::size_t>(kind)]; }

std::string to_string(const Action& action) {
  return absl::StrFormat("%d%c%d", action.stage, to_char(action.kind), action.micro_batch);
}

}  // namespace gpipe
