// Writes the masks that a trained U-Net predicts for images, as a pipeline.

#include <CLI/CLI.hpp>
#include <algorithm>
#include <iostream>
#include <map>
#include <stdexcept>

#include "examples/common/image.h"
#include "examples/unet/data.h"
#include "examples/unet/predictor.h"
#include "examples/unet/segmentation.h"

namespace gpipe::examples::unet {
namespace {

namespace fs = std::filesystem;

struct Options : PredictorOptions {
  std::vector<fs::path> input;
  bool overlay = false;
};

void add_options(CLI::App& app, Options& options) {
  options.output = "out/predict";
  add_predictor_options(app, options, "folder for the masks, NAME_mask.png");
  app.add_option("-i,--input", options.input, "images, or folders of images (JPEG, PNG, GIF, TIFF)")
      ->required()
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
      ->always_capture_default(false);
  app.add_flag("--overlay", options.overlay, "also write NAME_overlay.png, the image with the mask tinted");
}

// Refuses images of the same name, because their masks would be the same file.
std::vector<fs::path> list_images(const std::vector<fs::path>& inputs) {
  std::vector<fs::path> images;
  for (const auto& input : inputs) {
    if (!fs::is_directory(input)) {
      images.push_back(input);
      continue;
    }
    const auto before = images.size();
    for (const auto& entry : fs::directory_iterator(input)) {
      if (is_named_as_image(entry.path())) images.push_back(entry.path());
    }
    if (images.size() == before) throw std::runtime_error(input.string() + ": no image, such as .jpg");
    std::sort(images.begin() + static_cast<std::ptrdiff_t>(before), images.end());
  }
  std::map<std::string, fs::path> by_name;
  for (const auto& image : images) {
    const auto [other, is_new] = by_name.emplace(image.stem().string(), image);
    if (is_new) continue;
    throw std::runtime_error("two images have the same name: " + other->second.string() + " and " + image.string());
  }
  return images;
}

// Tints the image where the labels are not 0.
torch::Tensor overlay(const torch::Tensor& image, const torch::Tensor& labels, int classes) {
  const auto tint = classes == 2 ? torch::stack({labels * 255, labels * 0, labels * 0}) : paint_labels(labels, classes);
  return torch::where(labels > 0, image * 0.5 + tint * 0.5, image.to(torch::kFloat)).round().to(torch::kByte);
}

int predict(const Options& options) {
  const auto images = list_images(options.input);
  predict_images(options, images, [&](std::size_t number, const torch::Tensor& probabilities) {
    const auto& image = images[number];
    const auto classes = static_cast<int>(probabilities.size(1));
    const auto path = [&](const std::string& ending) {
      return options.output / (image.stem().string() + ending + ".png");
    };
    const auto labels = to_labels(probabilities)[0][0];
    write_png(path("_mask"), paint_labels(labels, classes));
    if (options.overlay) write_png(path("_overlay"), overlay(read_image(image), labels, classes));
  });
  std::cout << "wrote " << images.size() << " masks to " << options.output.string() << "/" << std::endl;
  return 0;
}

}  // namespace
}  // namespace gpipe::examples::unet

int main(int argc, char** argv) {
  CLI::App app("Predicts masks of images with a trained U-Net, as a pipeline over several devices.");
  gpipe::examples::unet::Options options;
  gpipe::examples::unet::add_options(app, options);
  return gpipe::examples::run_program(app, argc, argv, [&] { return gpipe::examples::unet::predict(options); });
}
