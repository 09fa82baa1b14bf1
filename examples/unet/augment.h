#pragma once

#include "examples/common/image.h"
#include "examples/common/random.h"

namespace gpipe::examples::unet {

/// Changes a training image and its mask at random: mirrors both left to right in half of the cases, and shifts them by
/// up to an eighth of each side, repeating the edge. Changes the contrast, brightness and tint of the image.
/// REQUIRES: the mask has one channel and the image's size.
void augment(Image& image, Image& mask, Random& random);

}  // namespace gpipe::examples::unet
