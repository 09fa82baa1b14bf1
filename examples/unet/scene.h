#pragma once

#include "examples/common/image.h"
#include "examples/common/random.h"

namespace gpipe::examples::unet {

inline constexpr int kSceneClasses = 4;

struct Scene {
  Image image;  ///< three channels
  Image mask;   ///< one channel: the class of each pixel
};

/// Errors: std::invalid_argument for a size or a number of classes that draw_scene() cannot draw.
void check_scene(Size size, int classes);

/// Draws a random street with one car in side view: sky, buildings, trees, other things in the colours of cars, light
/// and noise. In about half of the scenes something stands in front of the car; it is not part of the mask.
/// Classes of the mask: 0 background, 1 car, 2 windows, 3 wheels. Classes from `classes` on become 1.
/// REQUIRES: at least 16 pixels per side; classes from 2 to kSceneClasses.
Scene draw_scene(Random& random, Size size, int classes = 2);

}  // namespace gpipe::examples::unet
