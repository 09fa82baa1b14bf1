#pragma once

#include <string>

#include "gpipe/schedule/timeline.h"

namespace gpipe {

/// A timeline as an SVG picture: a row a worker, a box an action with the number of its micro-batch, the time below. A
/// box says on hovering what it is.
std::string to_svg(const Timeline& timeline);

}  // namespace gpipe
