#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>

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

/// MNIST's own names: train-images-idx3-ubyte and train-labels-idx1-ubyte; t10k-images-idx3-ubyte and
/// t10k-labels-idx1-ubyte.
IdxFiles training_files(const std::filesystem::path& directory);
IdxFiles test_files(const std::filesystem::path& directory);

/// Reads a set. Allocates nothing for a file whose length does not match its header.
/// Errors: std::runtime_error with the file's name and the reason, for a file that is missing, compressed, of another
/// kind, empty, truncated or too long, for a label that is not below `classes`, and for counts that differ.
LabelledImages read_idx(const IdxFiles& files, int classes = 10);

/// Creates or replaces both files. Errors: std::runtime_error with the path, if it cannot be written.
void write_idx(const IdxFiles& files, const LabelledImages& set);

}  // namespace gpipe::examples::mnist
