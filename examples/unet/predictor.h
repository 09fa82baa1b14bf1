#pragma once

#include <cstddef>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "examples/common/options.h"

namespace gpipe::examples::unet {

struct PredictorOptions : PipelineOptions {
  std::filesystem::path model;  ///< a snapshot of the training program
  std::optional<double> scale;  ///< size of the network's input, relative to the image; empty: as in training
  std::filesystem::path output;
};

/// Adds a flag for each option. `output` is the help text of --output.
void add_predictor_options(CLI::App& app, PredictorOptions& options, const std::string& output);

/// Gets the number of an image and its probabilities [1, classes, h, w] on the CPU, at the image's own size.
using UsePrediction = std::function<void(std::size_t image, const torch::Tensor& probabilities)>;

/// Applies a trained U-Net to images of any size. Reads the snapshot, cuts the model, prints the stages and creates the
/// output folder. If the cut needs measurements, they use the size of the first image. Then calls `use` for each image
/// in order. Errors: std::runtime_error with the file's name, for a file that is not a snapshot of the training program, or not
/// an image.
void predict_images(const PredictorOptions& options, const std::vector<std::filesystem::path>& images,
                    const UsePrediction& use);

}  // namespace gpipe::examples::unet
