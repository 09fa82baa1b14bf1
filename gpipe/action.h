#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "gpipe/api.h"

namespace gpipe {

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

GPIPE_API char to_char(Kind kind);

/// Returns the notation of torch.distributed.pipelining: "2F0" is the forward of micro-batch 0 on stage 2.
GPIPE_API std::string to_string(const Action& action);

/// One ordered list of actions per worker.
using Schedule = std::vector<std::vector<Action>>;

/// Which cells recompute their forward instead of storing its graph.
enum class Checkpoint {
  kNever,
  kExceptLast,  ///< all except those of the mini-batch's last micro-batch
  kAlways,
};

/// Returns all modes by name: "never", "except_last", "always".
GPIPE_API std::map<std::string, Checkpoint> checkpoints();
GPIPE_API std::string to_string(Checkpoint checkpoint);

/// Whether the mode recomputes a cell of this micro-batch.
GPIPE_API bool recomputes(Checkpoint checkpoint, int micro_batch, int micro_batches);

/// The schedule of forward() and its backward, and the default of step().
inline constexpr char kFillAndDrain[] = "gpipe";
/// The name that stands for the fastest of all schedules.
inline constexpr char kAnySchedule[] = "auto";

struct GPIPE_API Layout;

/// Generates the schedule of a training step. Throws std::invalid_argument for a layout that it has no schedule for.
using ScheduleFunction = std::function<Schedule(const Layout& layout, Checkpoint checkpoint)>;

}  // namespace gpipe
