#pragma once

#include <cstdint>
#include <filesystem>

#include "examples/common/image.h"
#include "examples/common/random.h"
#include "examples/resnet18_mnist/idx.h"

namespace gpipe::examples::mnist {

inline constexpr Size kDigitSize{28, 28};

/// Draws one digit, 0 to 9, light on dark in one channel. The way of writing it (see digit_glyphs()), the distortion,
/// slant, rotation, size, place, thickness, brightness and noise are random. It computes in integers, so pixels are the
/// same on every machine.
Image draw_digit(Random& random, int digit);

enum class Part { kTraining, kTest };

/// Draws `count` digits in random order. Digit i of a part does not depend on `count`. Errors: std::invalid_argument for
/// count < 1.
LabelledImages draw_digits(int count, uint64_t seed, Part part);

/// Writes both parts as training_files() and test_files() of the folder, and creates it if it is missing. Errors:
/// std::invalid_argument for counts < 1; std::runtime_error with the path, if it cannot be written.
void write_digits(const std::filesystem::path& directory, int training_count, int test_count, uint64_t seed);

}  // namespace gpipe::examples::mnist
