#pragma once

#include <cstdint>
#include <vector>

#include "examples/common/drawing.h"
#include "examples/resnet18_mnist/idx.h"

namespace gpipe::examples::mnist {

enum class Part { kTraining, kTest };

/// Draws `count` digits of 28 x 28 pixels in random order, light on dark. The font, slant, rotation, size, place,
/// thickness, brightness and noise are random. Digit i of a part does not depend on `count`.
LabelledImages draw_digits(int count, std::uint64_t seed, Part part);

/// Draws a confusion matrix in grey: a row per true class, a column per predicted class. The title tells the accuracy.
/// A cell is brighter the larger its share of the row's images is, and shows the number of its images if there are any.
/// `counts` has classes * classes numbers, row by row.
Drawing draw_confusion(const std::vector<std::int64_t>& counts, int classes);

}  // namespace gpipe::examples::mnist
