#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <string>

namespace gpipe::examples::mnist {

/// Grey images [n, height, width] of uint8, where 0 is black, with the class of each, [n].
struct LabelledImages {
  at::Tensor images;
  at::Tensor labels;
};

/// Reads folder/PART-images-idx3-ubyte and folder/PART-labels-idx1-ubyte, which have the IDX format of MNIST. `part` is
/// "train" or "t10k". Errors: std::runtime_error with the file's name and the reason, for a file that is missing,
/// compressed, of another kind, empty, truncated or too long, for a label that is not below 10, and for counts that
/// differ.
LabelledImages read_idx(const std::filesystem::path& folder, const std::string& part);

}  // namespace gpipe::examples::mnist
