#pragma once

#include "examples/common/image.h"

namespace gpipe::examples::unet {

/// Tints the image where the labels are not 0, and outlines them: a light line inside and a dark line outside, so that
/// the outline is visible on any colour. The tint is red for two classes, otherwise each class's colour.
/// REQUIRES: `labels` has one channel and the size of `image`, which has three.
Image overlay(Image image, const Image& labels, int classes);

}  // namespace gpipe::examples::unet
