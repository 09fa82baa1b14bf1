#pragma once

#include <filesystem>
#include <functional>
#include <optional>
#include <vector>

#include "examples/common/image.h"
#include "examples/common/pipeline_options.h"
#include "gpipe/gpipe.h"

namespace gpipe::examples::unet {

struct PredictorOptions : PipelineOptions {
  std::filesystem::path model;  ///< a snapshot of the training program
  std::optional<double> scale;  ///< size of the pictures that the network sees; none: as in training
  int workers = 2;              ///< see LoaderOptions
};

/// A flag for each.
void add_predictor_options(CLI::App& app, PredictorOptions& options);

/// A trained U-Net at work: any pictures in, probabilities at each picture's own size out.
class Predictor {
 public:
  /// Reads the snapshot and cuts the model as the options say; to measure a cut it takes pictures of the first one's
  /// size. Throws std::runtime_error that names the snapshot where it is none, or of another program, and for a file
  /// that is no picture.
  Predictor(const PredictorOptions& options, std::vector<std::filesystem::path> images);

  const GPipe& pipe() const { return pipe_; }
  int classes() const { return classes_; }

  /// Calls `use` for each image in order, with its number and its probabilities [1, classes, h, w] on the CPU.
  void run(const std::function<void(std::size_t image, const torch::Tensor& probabilities)>& use);

 private:
  const PredictorOptions options_;
  const std::vector<std::filesystem::path> images_;
  std::vector<Size> sizes_;  // of the files
  int classes_ = 2;
  double scale_ = 1;
  GPipe pipe_ = nullptr;
};

}  // namespace gpipe::examples::unet
