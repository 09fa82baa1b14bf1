#pragma once

#include <string_view>

#include "gpipe/api.h"
#include "gpipe/program.h"

namespace gpipe {

// Consecutive stages on one worker, as in the placement 0, 0, 1, 1, are *segments*: a schedule runs them as if they were
// one stage, but each has its own checkpoint mode. A forward runs them in order, a backward in reverse. So a worker holds
// the graph of only one recomputed segment at a time, unless backwards are split. In a V, the segments in the middle form
// two stages, one for each half.

/// Forwards only: each worker runs micro-batches 0..m-1 of each of its stages, stages ascending. Errors:
/// std::invalid_argument for an invalid layout, here and below.
GPIPE_API Schedule fill(const Layout& layout);

/// GPipe's schedule (Huang et al., arXiv:1811.06965): fill, then drain from micro-batch m-1 to 0, stages descending.
/// Adds the R's of with_recomputes(), so a worker holds at most one recomputed cell.
GPIPE_API Schedule fill_drain(const Layout& layout, const Checkpoints& checkpoints);

/// Inserts an R directly before the B or I of each cell that recomputes. Returns a schedule that has an R as it is. Errors:
/// as Checkpoints::check().
GPIPE_API Schedule with_recomputes(Schedule schedule, const Checkpoints& checkpoints, const Layout& layout);

/// Whether a schedule runs all forwards before all backwards, as forward() and its backward do.
GPIPE_API bool fills_and_drains(std::string_view name);

/// Returns what is wrong with an interleaved schedule that has one stage per worker; otherwise "".
GPIPE_API std::string too_few_stages(std::string_view name, const std::vector<int>& placement);

/// Stage s is on worker s mod `workers`.
GPIPE_API std::vector<int> looped_placement(int workers, int stages);

/// Two stages on each of p workers, a V: stages 0 to p - 1 on workers 0 to p - 1, the others on workers p - 1 to 0.
/// Errors: std::invalid_argument unless `stages` is even.
GPIPE_API std::vector<int> v_placement(int stages);

/// A named rule that generates the schedules of a training step.
struct ScheduleRule {
  std::string_view name;
  /// One line for help texts: what it does, and its source.
  std::string_view summary;
  /// Returns the rule's placement. `stages_per_worker` 1: as many as the rule needs. Errors: std::invalid_argument for
  /// numbers that it has no placement for.
  std::vector<int> (*place)(int stages, int stages_per_worker);
  /// Whether stage s must be on worker s mod the number of workers, any number of stages on each.
  bool loops = false;

  /// Returns what the rule needs but the layout does not have, such as "one stage per worker"; empty if the layout
  /// fits. REQUIRES: a valid layout.
  std::string misfit(const Layout& layout) const;
  /// Returns lists of F and B, or I and W. REQUIRES: misfit() is empty.
  Schedule generate(const Layout& layout) const;

  // The same for layouts without segments.
  std::string (*misfit_of_stages)(const Layout& layout);
  Schedule (*generate_of_stages)(const Layout& layout);
};

/// All rules, in the order of help texts.
GPIPE_API std::span<const ScheduleRule> schedule_rules();

/// Errors: std::invalid_argument, with the names that exist, for an unknown name.
GPIPE_API const ScheduleRule& schedule_rule(std::string_view name);

/// Generates a named schedule, with an R directly before the B or I of each cell that recomputes. Errors:
/// std::invalid_argument for an unknown name, an invalid layout, or a layout that does not fit the rule.
GPIPE_API Schedule make_schedule(std::string_view name, const Layout& layout, const Checkpoints& checkpoints);

}  // namespace gpipe
