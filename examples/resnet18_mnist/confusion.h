#pragma once

#include <cstdint>
#include <vector>

#include "examples/common/image.h"

namespace gpipe::examples::mnist {

/// A grey square a pair of classes, whose numbers stand above and on the left: row the true class, column the predicted
/// one. The brighter, the more of its row's images it holds; their number is written in it where there are any and it
/// has room.
///
/// `counts` has classes * classes numbers >= 0, row after row; else std::invalid_argument.
Image draw_confusion(const std::vector<std::int64_t>& counts, int classes);

}  // namespace gpipe::examples::mnist
