#pragma once

#include <filesystem>
#include <functional>
#include <optional>
#include <vector>

#include "examples/common/image.h"
#include "examples/common/options.h"
#include "gpipe/gpipe.h"

namespace gpipe::examples::unet {

struct PredictorOptions : PipelineOptions {
  std::filesystem::path model;  ///< a snapshot of the training program
  std::optional<double> scale;  ///< size of the network's input, relative to the image; empty: as in training
  int workers = 2;              ///< see LoaderOptions
};

/// Adds a flag for each option.
void add_predictor_options(CLI::App& app, PredictorOptions& options);

/// Applies a trained U-Net to images of any size.
class Predictor {
 public:
  /// Reads the snapshot, cuts the model and prints the stages. If the cut needs measurements, they use the size of the
  /// first image. Errors: std::runtime_error with the file's name, for a file that is not a snapshot of the training
  /// program, or not an image.
  Predictor(const PredictorOptions& options, std::vector<std::filesystem::path> images);

  int classes() const { return classes_; }

  /// Calls `use` for each image in order, with its number and its probabilities [1, classes, h, w] on the CPU, at the
  /// image's own size. Shows progress with that label.
  void run(const std::string& label,
           const std::function<void(std::size_t image, const torch::Tensor& probabilities)>& use);

 private:
  const PredictorOptions options_;
  const std::vector<std::filesystem::path> images_;
  std::vector<Size> sizes_;  // of the files
  int classes_ = 2;
  double scale_ = 1;
  GPipe pipe_ = nullptr;
};

}  // namespace gpipe::examples::unet
