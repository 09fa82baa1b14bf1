#pragma once

#include <cstdint>
#include <string>

namespace gpipe {

/// What a worker does to one cell.
enum class Kind : std::uint8_t {
  F,  ///< forward; builds no graph if the cell has an R
  R,  ///< recompute: runs the forward again from the stored inputs and builds the graph
  B,  ///< full backward: input and weight gradients
  I,  ///< input gradient only
  W,  ///< weight gradient, which follows I
};

/// One step of a worker: what it does to the cell (stage, micro-batch).
struct Action {
  Kind kind = Kind::F;
  int stage = 0;
  int micro_batch = 0;

  friend bool operator==(const Action&, const Action&) = default;
};

/// "F", "R", "B", "I" or "W".
char to_char(Kind kind);

/// Returns stage, kind and micro-batch in the notation of torch.distributed.pipelining: "2F0" is the forward of
/// micro-batch 0 on stage 2.
std::string to_string(const Action& action);

}  // namespace gpipe
