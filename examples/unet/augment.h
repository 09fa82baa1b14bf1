#pragma once

#include "examples/common/image.h"
#include "examples/common/random.h"

namespace gpipe::examples::unet {

/// Another picture of the same thing, drawn from `random`: in half of the cases mirrored left to right, shifted by up
/// to an eighth of each side (what comes in repeats the edge), with other contrast, brightness and tint. The mask, one
/// channel of the image's size, moves along.
void augment(Image& image, Image& mask, Random& random);

}  // namespace gpipe::examples::unet
