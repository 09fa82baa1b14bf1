#pragma once

#include <cstdint>
#include <filesystem>
#include <vector>

namespace gpipe::examples::unet {

/// An image and its mask.
struct Sample {
  std::filesystem::path image;
  std::filesystem::path mask;  ///< empty if unknown
};

/// The samples of a folder in the layout of the Carvana data set, sorted by name:
///   folder/imgs/<stem>.jpg, .jpeg or .png
///   folder/masks/<stem>_mask.gif or .png
/// Other files are ignored. Reads the headers of all files; damage after a header shows on decoding.
/// Errors: std::runtime_error, which names the files, if a folder is missing, there are no images, an image has no mask,
/// a mask has no image, a file is not an image, or an image and its mask differ in size.
std::vector<Sample> list_samples(const std::filesystem::path& folder);

struct Split {
  std::vector<Sample> training;
  std::vector<Sample> validation;
};

/// Draws `validation_percent` in [0, 100) of the samples, rounded, for validation. The same seed draws the same ones.
/// Both parts keep the order of `samples`. Neither is empty, unless validation_percent is 0.
/// Errors: std::invalid_argument for another percentage, or for too few samples.
Split split(const std::vector<Sample>& samples, double validation_percent, uint64_t seed);

}  // namespace gpipe::examples::unet
