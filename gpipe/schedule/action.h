#pragma once

#include <cstdint>
#include <string>

namespace gpipe {

/// What a worker does to one cell.
enum class Kind : std::uint8_t {
  F,  ///< forward; without a graph where the cell has an R
  R,  ///< recompute: the forward again, with a graph, from the stored inputs
  B,  ///< full backward: input and weight gradients
  I,  ///< input gradient only
  W,  ///< weight gradient, after I
};

/// One step of a worker: a kind applied to the cell (stage, micro-batch).
struct Action {
  Kind kind = Kind::F;
  int stage = 0;
  int micro_batch = 0;

  friend bool operator==(const Action&, const Action&) = default;
};

/// "F", "R", "B", "I" or "W".
char to_char(Kind kind);

/// Stage, kind, micro-batch, as PyTorch's pipelining prints them: "2F0" is the forward of micro-batch 0 on stage 2.
std::string to_string(const Action& action);

}  // namespace gpipe
