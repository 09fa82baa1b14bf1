#pragma once

#include <cstdint>
#include <filesystem>

#include "examples/common/image.h"
#include "examples/common/random.h"
#include "examples/resnet18_mnist/idx.h"

namespace gpipe::examples::mnist {

inline constexpr Size kDigitSize{28, 28};

/// Draws one digit, 0 to 9, light on dark in one channel: some way to write it (see glyphs()), bent, slanted, turned,
/// of some size, place, thickness and light, with noise. Whole numbers alone decide, so that pixels are the same on
/// every machine.
Image draw_digit(Random& random, int digit);

enum class Part { kTraining, kTest };

/// `count` digits in a random order. Item i of a part is the same whatever `count`. Throws std::invalid_argument for
/// count < 1.
LabelledImages draw_digits(int count, uint64_t seed, Part part);

/// Writes both parts as training_files() and test_files() of the directory, which is made where missing. Throws
/// std::invalid_argument for counts < 1, std::runtime_error that names the path where it cannot be written.
void write_digits(const std::filesystem::path& directory, int training_count, int test_count, uint64_t seed);

}  // namespace gpipe::examples::mnist
