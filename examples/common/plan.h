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

/// How to cut and run a model, the measured costs of its layers, and the predicted cost of a step.
struct Plan {
  std::vector<std::int64_t> balance;
  std::int64_t chunks = 1;
  Checkpoint checkpoint = Checkpoint::kNever;
  std::string schedule;        ///< a name, or @FILE
  std::vector<int> placement;  ///< with --schedule auto; else as the options say
  Profile profile;
  std::optional<Prediction> prediction;  ///< none for micro-batches of a single image, which are measured as two
  std::vector<Candidate> candidates;     ///< the plans that --balance auto compared, the best first
  std::string choice;                    ///< how the balance was chosen, such as "by-time"
};

/// How to measure a model for workers on these devices. Measurements run on the first device.
ProfileOptions profile_options(const std::vector<torch::Device>& devices);

/// Checks devices, stages, layers and schedule as a pipeline does, before anything is written or measured.
/// Errors: std::invalid_argument; std::out_of_range for a device that does not exist.
void check_pipeline(const torch::nn::Sequential& model, const PipelineOptions& options);

/// Checks that the schedule fits an epoch's last mini-batch, which can have fewer micro-batches.
/// Errors: std::invalid_argument.
void check_last_mini_batch(const PipelineOptions& options, std::int64_t training_images);

/// Measures the model for images of that shape, with autocast if the options ask for it, and plans. Shows progress on a
/// terminal. Over ranks, rank 0 measures, as if it had all workers; the others get how to cut and run, without costs. Keeps
/// the options' chunks and checkpoint mode, unless the balance is "auto".
Plan make_plan(const torch::nn::Sequential& model, const TrainingOptions& options,
               const std::vector<std::int64_t>& image_shape, bool terminal, std::ostream& out);

/// A pipeline for training, with the plan's balance, chunks, checkpoint mode and schedule. The rest is as in the options.
GPipe make_pipe(const torch::nn::Sequential& model, const Plan& plan, const PipelineOptions& options);

/// A pipeline for inference only, with the options' balance and chunks.
GPipe make_inference_pipe(const torch::nn::Sequential& model, const PipelineOptions& options,
                          const std::vector<std::int64_t>& image_shape);

/// Prints the plan: balance, micro-batches, checkpoint mode, and the predicted time and memory per stage. With `details`
/// it also prints the costs of each layer, and all plans that were compared. `model` has the layers of all ranks.
void print_plan(std::ostream& out, const std::string& name, const torch::nn::Sequential& model, const GPipe& pipe,
                const Plan& plan, bool details);

}  // namespace gpipe::examples
