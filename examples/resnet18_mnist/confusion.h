#pragma once

#include <cstdint>
#include <vector>

#include "examples/common/image.h"

namespace gpipe::examples::mnist {

/// Draws a confusion matrix in grey: a row per true class, a column per predicted class. The title tells the accuracy.
/// A cell is brighter the larger its share of the row's images is. It shows the number of its images if there are any
/// and the number fits.
///
/// `counts` has classes * classes numbers, row by row. Errors: std::invalid_argument for another size, or for numbers
/// below 0.
Image draw_confusion(const std::vector<std::int64_t>& counts, int classes);

}  // namespace gpipe::examples::mnist
