#pragma once

#include "examples/common/image.h"
#include "examples/common/random.h"

namespace gpipe::examples::unet {

inline constexpr int kSceneClasses = 4;

struct Scene {
  Image image;  ///< three channels
  Image mask;   ///< one channel: the class of what is seen
};

/// Throws std::invalid_argument for a size or classes that draw_scene() cannot draw.
void check_scene(Size size, int classes);

/// Draws one car, from the side, in a street: sky, buildings, trees, things of the colours that cars have, light and
/// noise, all drawn from `random`; in about half of the scenes something stands before the car, and is no part of the
/// mask. At least 16 pixels a side. The classes of the mask: 0 all else, 1 the car, 2 its windows, 3 its wheels; those
/// from `classes` on, in 2 to kSceneClasses, are 1.
Scene draw_scene(Random& random, Size size, int classes = 2);

}  // namespace gpipe::examples::unet
