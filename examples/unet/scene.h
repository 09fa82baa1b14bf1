#pragma once

#include "examples/common/image.h"
#include "examples/common/random.h"

namespace gpipe::examples::unet {

struct Scene {
  Image image;  ///< three channels
  Image mask;   ///< 1 where the car is seen
};

/// Draws one car, from the side, in a street: sky, buildings, trees, things of the colours that cars have, light and
/// noise, all drawn from `random`; in about half of the scenes something stands before the car, and is no part of the
/// mask. At least 16 pixels a side.
Scene draw_scene(Random& random, Size size);

}  // namespace gpipe::examples::unet
