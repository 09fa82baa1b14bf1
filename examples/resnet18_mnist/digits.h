#pragma once

#include <cstdint>
#include <filesystem>
#include <vector>

#include "examples/common/drawing.h"

namespace gpipe::examples::mnist {

/// Grey images [n, height, width] of uint8, where 0 is black, with the class of each, [n].
struct LabelledImages {
  at::Tensor images;
  at::Tensor labels;
};

/// The two files of a set in the IDX format of MNIST: bytes in three dimensions, and labels.
struct IdxFiles {
  std::filesystem::path images;
  std::filesystem::path labels;
};

enum class Part { kTraining, kTest };

/// MNIST's own names: train-images-idx3-ubyte and train-labels-idx1-ubyte; t10k-images-idx3-ubyte and
/// t10k-labels-idx1-ubyte.
IdxFiles files_of(Part part, const std::filesystem::path& directory);

/// Reads a set. Allocates nothing for a file whose length does not match its header.
/// Errors: std::runtime_error with the file's name and the reason, for a file that is missing, compressed, of another
/// kind, empty, truncated or too long, for a label that is not below `classes`, and for counts that differ.
LabelledImages read_idx(const IdxFiles& files, int classes = 10);

/// Creates or replaces both files. Errors: std::runtime_error with the path, if it cannot be written.
void write_idx(const IdxFiles& files, const LabelledImages& set);

/// Draws `count` digits of 28 x 28 pixels in random order, light on dark. The font, distortion, slant, rotation, size,
/// place, thickness, brightness and noise are random. Digit i of a part does not depend on `count`.
LabelledImages draw_digits(int count, std::uint64_t seed, Part part);

/// Draws a confusion matrix in grey: a row per true class, a column per predicted class. The title tells the accuracy.
/// A cell is brighter the larger its share of the row's images is, and shows the number of its images if there are any.
/// `counts` has classes * classes numbers, row by row.
Drawing draw_confusion(const std::vector<std::int64_t>& counts, int classes);

}  // namespace gpipe::examples::mnist
