#pragma once

#include <cstdint>
#include <filesystem>
#include <vector>

namespace gpipe::examples::unet {

/// A picture and the mask of what to find in it.
struct Sample {
  std::filesystem::path image;
  std::filesystem::path mask;  ///< empty: unknown
};

/// The samples of a directory in Carvana's layout, sorted by name:
///   dir/imgs/<stem>.jpg, .jpeg or .png
///   dir/masks/<stem>_mask.gif or .png
/// Other kinds of files are passed over. Throws std::runtime_error where a directory is missing, there are no images,
/// an image has no mask or a mask no image (naming the stems), or a file is no image or has another size than its mask
/// (naming the files). It reads the headers of all files; damage behind a header shows on decoding.
std::vector<Sample> list_samples(const std::filesystem::path& directory);

struct Split {
  std::vector<Sample> training;
  std::vector<Sample> validation;
};

/// Draws `validation_percent` in [0, 100) of the samples, rounded, for validation: the same ones for the same seed.
/// Both parts keep the order of `samples`; neither is empty, unless validation_percent is 0. Throws
/// std::invalid_argument where that cannot be.
Split split(const std::vector<Sample>& samples, double validation_percent, uint64_t seed);

}  // namespace gpipe::examples::unet
