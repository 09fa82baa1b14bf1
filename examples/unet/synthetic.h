#pragma once

#include <cstdint>
#include <filesystem>

#include "examples/common/image.h"

namespace gpipe::examples::unet {

/// Writes `count` scenes (see draw_scene()) in the layout of the Carvana data set: folder/imgs/0000.jpg with
/// folder/masks/0000_mask.gif, and so on. Masks of more than two classes are coloured PNG files. The same seed draws the
/// same scenes on every machine, and sample i does not depend on `count`. Existing files of these names are replaced.
/// Errors: std::invalid_argument for count < 1, or for a size or a number of classes that draw_scene() refuses;
/// std::runtime_error with the path, if it cannot be written, or if imgs/ or masks/ hold other files.
void write_synthetic(const std::filesystem::path& folder, int count, Size size, uint64_t seed, int classes = 2);

}  // namespace gpipe::examples::unet
