// Writes the masks that a trained U-Net predicts for images, as a pipeline.

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <iostream>
#include <map>
#include <stdexcept>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "examples/common/files.h"
#include "examples/common/flags.h"
#include "examples/common/picture.h"
#include "examples/common/progress.h"
#include "examples/unet/classes.h"
#include "examples/unet/overlay.h"
#include "examples/unet/predictor.h"
#include "examples/unet/segmentation.h"

namespace gpipe::examples::unet {
namespace {

namespace fs = std::filesystem;

struct Options : PredictorOptions {
  std::vector<fs::path> input;
  fs::path output = "out/predict";
  double threshold = 0.5;
  bool probabilities = false;
  bool overlay = false;
};

void add_options(CLI::App& app, Options& options) {
  add_predictor_options(app, options);
  app.add_option("-i,--input", options.input, "images, or folders of images (JPEG, PNG, GIF)")
      ->required()
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
      ->always_capture_default(false);
  app.add_option("-o,--output", options.output, "folder for the masks, NAME_mask.png")->transform(path_name());
  app.add_option(
         "-t,--threshold", options.threshold,
         "probability above which a pixel is of class 1; with more than two classes, the most probable class is taken")
      ->transform(number_between(0, 1));
  app.add_flag("--probabilities", options.probabilities,
               "also write NAME_probability_K.png for each class K except 0, white for certain");
  app.add_flag("--overlay", options.overlay,
               "also write NAME_overlay.png, the image with the mask tinted and outlined");
}

std::vector<fs::path> list_images(const std::vector<fs::path>& inputs) {
  std::vector<fs::path> images;
  for (const auto& input : inputs) {
    if (!fs::is_directory(input)) {
      images.push_back(input);
      continue;
    }
    const auto before = images.size();
    for (const auto& entry : fs::directory_iterator(input)) {
      if (!entry.is_regular_file()) continue;
      const auto extension = absl::AsciiStrToLower(entry.path().extension().string());
      if (extension == ".jpg" || extension == ".jpeg" || extension == ".png" || extension == ".gif") {
        images.push_back(entry.path());
      }
    }
    if (images.size() == before) throw std::runtime_error(input.string() + ": no .jpg, .jpeg, .png or .gif file");
    std::sort(images.begin() + static_cast<std::ptrdiff_t>(before), images.end());
  }
  return images;
}

// Refuses images of the same name, because their masks would be the same file, and an output folder that holds an image.
void check_names(const std::vector<fs::path>& images, const fs::path& output) {
  std::map<std::string, fs::path> by_name;
  for (const auto& image : images) {
    if (fs::absolute(image).lexically_normal().parent_path() ==
        fs::absolute(output / "_").lexically_normal().parent_path()) {
      throw std::runtime_error("--output " + output.string() + " is the folder of " + image.string() +
                               "; give another folder");
    }
    const auto [other, is_new] = by_name.emplace(image.stem().string(), image);
    if (is_new) continue;
    throw std::runtime_error("two images have the same name: " + other->second.string() + " and " + image.string() +
                             "; give them in separate runs with separate --output");
  }
}

int predict(const Options& options) {
  const auto images = list_images(options.input);
  check_names(images, options.output);
  check_writable_directory(options.output);
  Predictor predictor(options, images);
  const int classes = predictor.classes();
  print_stages(std::cout, "U-Net", *predictor.pipe(), predictor.pipe());

  Progress progress(std::cout, isatty(STDOUT_FILENO) != 0, "predict", static_cast<int64_t>(images.size()));
  predictor.run([&](std::size_t number, const torch::Tensor& probabilities) {
    const auto& image = images[number];
    const auto path = [&](const std::string& ending) {
      return options.output / (image.stem().string() + ending + ".png");
    };
    const auto chosen =
        (classes == 2 ? probabilities.narrow(1, 1, 1) > options.threshold : to_labels(probabilities)).to(torch::kByte);
    Image labels({static_cast<int>(chosen.size(3)), static_cast<int>(chosen.size(2))}, 1);
    std::copy_n(chosen.contiguous().const_data_ptr<uint8_t>(), labels.pixels.size(), labels.pixels.begin());
    write_png(path("_mask"), paint_labels(labels, classes));
    for (int k = 1; options.probabilities && k < classes; ++k) {
      write_png(path(absl::StrCat("_probability_", k)), to_image(probabilities[0].narrow(0, k, 1)));
    }
    if (options.overlay) write_png(path("_overlay"), overlay(read_image(image), labels, classes));
    progress.add(1);
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
