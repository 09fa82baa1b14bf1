#pragma once

#include <torch/nn/modules/container/sequential.h>

#include <cstdint>
#include <string>
#include <vector>

#include "balance/predict.h"
#include "examples/common/options.h"
#include "gpipe/gpipe.h"

namespace gpipe::examples {

/// A pipeline for training, and what a step of it should cost.
struct Planned {
  GPipe pipe = nullptr;
  std::optional<Prediction> prediction = {};  ///< the first process's, with at least two images per micro-batch
};

/// Checks stages, layers, devices, schedule and processes, before anything is written or measured.
/// Errors: std::invalid_argument; std::out_of_range for a device that does not exist.
void check_pipeline(const torch::nn::Sequential& model, const PipelineOptions& options);

/// Measures the model for images of that shape, cuts it, and prints the plan. Over ranks, rank 0 measures, as if it had
/// all workers, and tells the others the balance.
Planned plan_training(const torch::nn::Sequential& model, const PipelineOptions& options,
                      torch::IntArrayRef image_shape);

/// A pipeline of the given layers per stage, or of stages of equal time for a sample micro-batch.
GPipe cut_by_time(const torch::nn::Sequential& model, const PipelineOptions& options, const Value& sample);

}  // namespace gpipe::examples
