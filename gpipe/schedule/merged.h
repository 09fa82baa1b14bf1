#pragma once

#include <optional>

#include "gpipe/program.h"

namespace gpipe {

/// A layout as a rule sees it: the segments of a stage are one stage.
struct Merged {
  Layout layout;
  std::vector<int> firsts;  ///< the first segment of each stage, and the number of all segments
};

/// Whether the layout has the V placement.
bool is_v(const Layout& layout);

/// Makes one stage of consecutive stages on a worker.
Merged merge_segments(const Layout& layout);

/// The same for a V, whose segments in the middle are two stages. Returns nothing for another placement.
std::optional<Merged> merge_as_v(const Layout& layout);

/// Runs the segments of each stage one after the other, in a backward the last one first.
Schedule with_segments(const Schedule& schedule, const std::vector<int>& firsts);

}  // namespace gpipe
