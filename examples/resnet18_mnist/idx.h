#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <vector>

#include "examples/common/image.h"

namespace gpipe::examples::mnist {

/// Grey images of one size, each with the number of its class.
struct LabelledImages {
  Size size;
  std::vector<uint8_t> pixels;  ///< image after image, rows from the top; 0 is black
  std::vector<uint8_t> labels;

  size_t count() const { return labels.size(); }
};

/// A set is two files in the IDX format of MNIST: bytes in three dimensions, and labels.
struct IdxFiles {
  std::filesystem::path images;
  std::filesystem::path labels;
};

/// The names of MNIST's own files: train-images-idx3-ubyte and train-labels-idx1-ubyte; t10k-images-idx3-ubyte and
/// t10k-labels-idx1-ubyte.
IdxFiles training_files(const std::filesystem::path& directory);
IdxFiles test_files(const std::filesystem::path& directory);

/// Throws std::runtime_error that names the file and the reason: missing, still compressed, of another kind, empty,
/// shorter or longer than it says, a label that is not below `classes`, or counts that differ. Nothing is allocated for
/// a file whose length differs from what its header says.
LabelledImages read_idx(const IdxFiles& files, int classes = 10);

/// Creates or replaces both files. Throws std::invalid_argument where the parts of the set do not fit together,
/// std::runtime_error that names the path where it cannot be written.
void write_idx(const IdxFiles& files, const LabelledImages& set);

}  // namespace gpipe::examples::mnist
