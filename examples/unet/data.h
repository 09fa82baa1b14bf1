#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "examples/common/image.h"
#include "examples/common/trainer.h"

namespace gpipe::examples::unet {

// --- Files

/// An image and its mask.
struct Sample {
  std::filesystem::path image;
  std::filesystem::path mask = {};  ///< empty if unknown
};

using FilesByStem = std::map<std::string, std::filesystem::path>;

/// The images in a folder, by their names without suffix and ending. Other files are ignored. Errors: std::runtime_error
/// if there are none, two have the same name, or one has another suffix.
FilesByStem images_in(const std::filesystem::path& folder, const std::string& suffix = "");

/// The samples of a folder in the layout of the Carvana data set, sorted by name:
///   folder/imgs/<stem>.jpg
///   folder/masks/<stem>_mask.png
/// or with another ending of image.h. Other files are ignored. Errors: std::runtime_error, which names the files, if there
/// are none, an image or a mask is alone, a file is not an image, or an image and its mask differ in size. Damage after a
/// header shows on decoding.
std::vector<Sample> list_samples(const std::filesystem::path& folder);

struct Split {
  std::vector<Sample> training;
  std::vector<Sample> validation;
};
/// Draws a percentage of the samples for validation. The same seed draws the same ones. Both parts keep the order of
/// `samples` and have at least one. Errors: std::invalid_argument for fewer than two samples.
Split split(const std::vector<Sample>& samples, double validation_percent, std::uint64_t seed);

// --- Classes of a mask's pixels
//
// 0 is the background, which is black in masks; 1 and up are the things to find. With two classes, these have any one
// colour. In shades of grey, a pixel is of class 1 above half of the lightest. With more classes, class k has the k-th
// colour of PASCAL VOC's masks (black, maroon, green, olive, navy, ...), or the grey level k, of 8 or 16 bits. A mask is
// read as numbers, not as light: neither its gamma nor its palette's order counts.

inline constexpr int kMaxClasses = 64;

/// Reads all masks. Errors: as read_labels(); std::runtime_error if all pixels are of one class.
void check_masks(const std::vector<Sample>& samples, int classes);

/// The colours of the classes in masks, [classes, 3] of uint8.
at::Tensor class_colors(int classes);

/// Reads a mask as classes [height, width]. Errors: std::runtime_error with the file's name, if it cannot be read or
/// has a colour that is not of these classes.
at::Tensor read_labels(const std::filesystem::path& path, int classes);

/// The inverse of read_labels(): an image for a mask file.
at::Tensor paint_labels(const at::Tensor& labels, int classes);

// --- Mini-batches

/// Reads images [n, 3, height, width] from 0 to 1, and labels [n, 1, height, width]. All samples are resized to one size,
/// masks by the nearest pixel. A sample without a mask gets a mask of zeros. Errors: as the files' readers.
Example read_samples(const std::vector<Sample>& samples, Size size, int classes);

// --- Drawn data

struct Scene {
  at::Tensor image;
  at::Tensor mask;  ///< the class of each pixel
};

/// Draws a car on a street, before blocks in the colours of cars, with noise. Classes of the mask: 0 background, 1 car,
/// 2 windows, 3 wheels. Classes from `classes` on become 1. Errors: std::invalid_argument for more than 4 classes.
Scene draw_scene(std::uint64_t seed, int number, Size size, int classes = 2);

/// Writes scenes as PNG files in the layout of the Carvana data set: folder/imgs/0000.png with
/// folder/masks/0000_mask.png, and so on. Replaces existing files of these names. Errors: as draw_scene();
/// std::runtime_error with the path, if it cannot be written.
void write_scenes(const std::filesystem::path& folder, int count, Size size, std::uint64_t seed, int classes);

}  // namespace gpipe::examples::unet
