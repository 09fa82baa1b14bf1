#pragma once

#include <vector>

#include "examples/common/canvas.h"

namespace gpipe::examples::unet {

/// The side view of a car that faces right. Points are in thousandths: x of its length, from the rear; y of its height,
/// from the ground.
struct CarBody {
  int height = 0;  ///< thousandths of the length
  std::vector<Point> outline;
  std::vector<std::vector<Point>> windows;
};

/// A saloon, a hatchback, an off-roader, a van, a pick-up and a coupe.
const std::vector<CarBody>& car_bodies();

}  // namespace gpipe::examples::unet
