#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>

#include "examples/common/image.h"

namespace gpipe::examples::unet {

struct Scene {
  at::Tensor image;
  at::Tensor mask;  ///< the class of each pixel
};

/// Draws a random street with one car in side view: sky, buildings, trees, other things in the colours of cars, light
/// and noise. In about half of the scenes something stands in front of the car; it is not part of the mask.
/// Classes of the mask: 0 background, 1 car, 2 windows, 3 wheels. Classes from `classes` on become 1.
/// Errors: std::invalid_argument for fewer than 16 pixels per side, or more than 4 classes.
Scene draw_scene(std::uint64_t seed, int number, Size size, int classes = 2);

/// Writes scenes as PNG files in the layout of the Carvana data set: folder/imgs/0000.png with
/// folder/masks/0000_mask.png, and so on. Replaces existing files of these names. Errors: as draw_scene();
/// std::runtime_error with the path, if it cannot be written.
void write_scenes(const std::filesystem::path& folder, int count, Size size, std::uint64_t seed, int classes);

}  // namespace gpipe::examples::unet
