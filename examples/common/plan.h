#pragma once

#include <torch/nn/modules/container/sequential.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "balance/predict.h"
#include "examples/common/options.h"
#include "gpipe/gpipe.h"

namespace gpipe::examples {

/// A pipeline for training, and what a step of it should cost.
struct Planned {
  GPipe pipe = nullptr;
  std::optional<Prediction> prediction;  ///< none for micro-batches of a single image, which are measured as two
};

/// Checks stages, layers, devices, schedule and processes, before anything is written or measured.
/// Errors: std::invalid_argument; std::out_of_range for a device that does not exist.
void check_pipeline(const torch::nn::Sequential& model, const PipelineOptions& options);

/// Measures the model for images of that shape, cuts it, and prints the plan. Over ranks, rank 0 measures, as if it had
/// all workers, and tells the others. Keeps the options' chunks, checkpoint mode and schedule, or with --balance auto
/// replaces them.
Planned plan_training(const torch::nn::Sequential& model, const std::string& name, TrainingOptions& options,
                      const std::vector<std::int64_t>& image_shape);

/// A pipeline for inference only, with the options' balance and chunks. Measures only if the cut needs it. Prints the
/// stages.
GPipe plan_inference(const torch::nn::Sequential& model, const std::string& name, const PipelineOptions& options,
                     const std::vector<std::int64_t>& image_shape);

}  // namespace gpipe::examples
