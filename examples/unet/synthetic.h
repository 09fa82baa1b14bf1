#pragma once

#include <cstdint>
#include <filesystem>

#include "examples/common/image.h"

namespace gpipe::examples::unet {

/// Writes `count` scenes (see draw_scene()) in Carvana's layout: dir/imgs/0000.jpg with dir/masks/0000_mask.gif, and so
/// on; masks of more than two classes as coloured _mask.png. Pictures are the same on every machine for the same seed,
/// and sample i is the same whatever `count`. Files of the same names are replaced. Throws std::invalid_argument for
/// count < 1 or a size or classes that draw_scene() refuses, std::runtime_error that names the path where it cannot
/// write, or where imgs/ or masks/ hold any other file: the sets would mix.
void write_synthetic(const std::filesystem::path& directory, int count, Size size, uint64_t seed, int classes = 2);

}  // namespace gpipe::examples::unet
