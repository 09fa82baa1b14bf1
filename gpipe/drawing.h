#pragma once

#include "gpipe/timeline.h"

namespace gpipe {

/// Returns a timeline as an SVG picture: one row per worker, one box per action with the number of its micro-batch, and
/// a time axis below. Hovering over a box shows its action and duration.
std::string to_svg(const Timeline& timeline);

}  // namespace gpipe
