#pragma once

#include <filesystem>

#include "examples/common/canvas.h"
#include "examples/common/image.h"

namespace gpipe::examples::unet {

// The classes of a mask's pixels: class 0 is the background; classes 1 and up are the things to find.
//
// A mask file of two classes is black and white. With more classes, class k has the k-th colour of PASCAL VOC's masks
// (black, maroon, green, olive, navy, ...), or the grey level k.

inline constexpr int kMaxClasses = 64;

/// The colour of a class in masks of more than two classes.
Color class_color(Label label);

/// Reads a mask as one channel of classes below `classes`, which is 2 to kMaxClasses. Errors: std::runtime_error with
/// the file's name, if it cannot be read or has a colour that is not of these classes.
Image read_labels(const std::filesystem::path& path, int classes);
/// Resized to `wanted` by the nearest pixel.
Image read_labels(const std::filesystem::path& path, int classes, Size wanted);

/// The inverse of read_labels(): an image with one channel of 0 and 255 for two classes, otherwise with three channels.
Image paint_labels(const Image& labels, int classes);

}  // namespace gpipe::examples::unet
