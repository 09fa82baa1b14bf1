#pragma once

#include <filesystem>

#include "examples/common/canvas.h"
#include "examples/common/image.h"

namespace gpipe::examples::unet {

// What a mask tells apart: class 0 is all else, usually the background, and class 1 and on are the things to find.
//
// A mask file of two classes is black and white. One of more is coloured, class k by the k-th colour of the map that
// PASCAL VOC's masks have (black, maroon, green, olive, navy, ...), or grey, class k as grey level k.

inline constexpr int kMaxClasses = 64;

/// Of class k in masks of more than two classes.
Color class_color(Label label);

/// One channel of classes below `classes`, in 2 to kMaxClasses. Throws std::runtime_error that names the file for one
/// that cannot be read, or has a colour of no such class.
Image read_labels(const std::filesystem::path& path, int classes);
/// Resized to `wanted` by the nearest pixel.
Image read_labels(const std::filesystem::path& path, int classes, Size wanted);

/// The opposite, as a picture: one channel of 0 and 255 for two classes, else three channels.
Image paint_labels(const Image& labels, int classes);

}  // namespace gpipe::examples::unet
