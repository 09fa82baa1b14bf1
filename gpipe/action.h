#pragma once

#include <compare>
#include <cstdint>
#include <functional>
#include <limits>
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

/// Which cells of a stage recompute their forward instead of storing its graph.
class GPIPE_API Checkpoint {
 public:
  static const Checkpoint kNever;
  static const Checkpoint kExceptLast;  ///< all except the mini-batch's last micro-batch
  static const Checkpoint kAlways;
  /// Recomputes `count` of the micro-batches that the stage has in flight at once. E.g. the first of 4 workers has up
  /// to 4 in flight under 1f1b; with a count of 1 it recomputes micro-batches 0, 4, 8 and so on. Errors:
  /// std::invalid_argument for count < 0.
  static Checkpoint in_flight(int count);
  constexpr Checkpoint() = default;  // kNever

  /// `in_flight`: the most micro-batches that the stage has in flight at once.
  bool recomputes(int micro_batch, int micro_batches, int in_flight) const;
  /// The number of micro-batches for which recomputes() holds if all are in flight at once.
  int recomputed(int micro_batches) const;

  /// A mode that recomputes less comes first.
  friend auto operator<=>(const Checkpoint&, const Checkpoint&) = default;
  friend GPIPE_API std::string to_string(Checkpoint checkpoint);

 private:
  explicit constexpr Checkpoint(int count) : count_(count) {}

  int count_ = 0;
};
inline constexpr Checkpoint Checkpoint::kNever(0);
inline constexpr Checkpoint Checkpoint::kExceptLast(std::numeric_limits<int>::max() - 1);
inline constexpr Checkpoint Checkpoint::kAlways(std::numeric_limits<int>::max());

/// Returns the modes that have names: "never", "except_last", "always".
GPIPE_API std::map<std::string, Checkpoint> checkpoints();
/// Returns the name of a mode, or the number of Checkpoint::in_flight().
GPIPE_API std::string to_string(Checkpoint checkpoint);

/// The checkpoint mode of each stage, or one for all.
struct GPIPE_API Checkpoints {
  /*implicit*/ Checkpoints(Checkpoint of_all = {}) : modes{of_all} {}
  /*implicit*/ Checkpoints(std::vector<Checkpoint> of_stages) : modes(std::move(of_stages)) {}
  Checkpoints(std::initializer_list<Checkpoint> of_stages) : modes(of_stages) {}

  /// Errors: std::invalid_argument unless there is one mode for all, or one for each stage.
  void check(int stages) const;
  /// REQUIRES: check() for a number of stages that includes `stage`.
  Checkpoint of(int stage) const { return modes.size() == 1 ? modes.front() : modes[stage]; }

  std::vector<Checkpoint> modes;

  friend auto operator<=>(const Checkpoints&, const Checkpoints&) = default;
};

/// "always", or "[always, 2, never]".
GPIPE_API std::string to_string(const Checkpoints& checkpoints);

/// The schedule of forward() and its backward, and the default of step().
inline constexpr char kFillAndDrain[] = "gpipe";
/// The name that stands for the fastest of all schedules.
inline constexpr char kAnySchedule[] = "auto";

struct GPIPE_API Layout;

/// Generates the schedule of a training step. The pipeline adds the R's of the checkpoint mode to a schedule without R.
/// Throws std::invalid_argument for a layout that it has no schedule for.
using ScheduleFunction = std::function<Schedule(const Layout& layout)>;

}  // namespace gpipe
