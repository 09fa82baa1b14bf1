#pragma once

#include <torch/nn/modules/container/sequential.h>

#include <cstdint>
#include <iosfwd>
#include <optional>
#include <string>
#include <vector>

#include "balance/predict.h"
#include "balance/profile.h"
#include "balance/profiler.h"
#include "balance/search.h"
#include "examples/common/training_options.h"
#include "gpipe/gpipe.h"

namespace gpipe::examples {

/// How a model is to be cut and run, what its layers were measured to cost, and what a step is predicted to cost.
struct Plan {
  std::vector<std::int64_t> balance;
  std::int64_t chunks = 1;
  Checkpoint checkpoint = Checkpoint::kNever;
  std::vector<torch::Device> devices;  ///< one a stage
  Profile profile;
  std::optional<Prediction> prediction;  ///< none for micro-batches of a single image, which are measured as two
  std::vector<Candidate> candidates;  ///< that were compared to choose balance, chunks and checkpoint; the best first
};

/// How to measure a model whose stages will run on these devices: on the first of them.
ProfileOptions profile_options(const std::vector<torch::Device>& devices);

/// Refuses, before anything is written or measured, what a pipeline would refuse: devices, numbers of stages and layers.
void check_pipeline(const torch::nn::Sequential& model, const PipelineOptions& options);

/// Measures the model for images of that shape, under autocast where the options say so, showing how far it is on a
/// terminal, and plans. The options' chunks and checkpoint mode are kept, unless the balance is "auto".
Plan make_plan(const torch::nn::Sequential& model, const TrainingOptions& options,
               const std::vector<std::int64_t>& image_shape, bool terminal, std::ostream& out);

GPipe make_pipe(const torch::nn::Sequential& model, const Plan& plan);

/// For inference only: cut as the options say, chunks kept.
GPipe make_inference_pipe(const torch::nn::Sequential& model, const PipelineOptions& options,
                          const std::vector<std::int64_t>& image_shape);

/// The profile, the candidates if any, the cut, the prediction.
void print_plan(std::ostream& out, const std::string& name, const GPipe& pipe, const Plan& plan);

}  // namespace gpipe::examples
