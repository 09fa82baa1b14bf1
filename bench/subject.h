#pragma once

#include <torch/nn/modules/container/sequential.h>
#include <torch/types.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "bench/measure.h"
#include "gpipe/gpipe.h"

namespace gpipe::bench {

/// A model to benchmark, and one mini-batch for it.
///
///   mlp        16 layers, each Linear(1024, 1024) and ReLU; 1,024 rows
///   unet       models::unet, depth 4, 16 channels at full resolution; 16 images of 3x96x96
///   resnet18   models::resnet18; 16 images of 3x64x64 per micro-batch
///   resnet50   models::resnet50; the same images (with fewer, PyTorch's 1x1 convolutions use a slow kernel)
///   encoder    8 blocks of a transformer's encoder, 256 wide, 4 heads; 32 sequences of 64
struct Subject {
  std::string name;
  torch::nn::Sequential model;
  torch::Tensor input;
  std::int64_t split_size;  ///< samples per micro-batch
};

/// Makes the model with fresh weights, and a mini-batch of `chunks` equal micro-batches. Errors: std::invalid_argument
/// if the mini-batch cannot be split equally. REQUIRES: the name is one of those above.
Subject subject(const std::string& name, int chunks);

/// Makes a pipeline for the row, with one thread per stage; over these ranks, unless they are null.
GPipe make_pipe(const Subject& subject, const std::vector<std::int64_t>& balance, const Row& row,
                const std::shared_ptr<Ranks>& ranks = nullptr);

/// Clears the gradients of a model or a pipeline.
template <typename Model>
void clear_gradients(Model& model) {
  for (auto& parameter : model->parameters()) parameter.mutable_grad().reset();
}

/// Clears the gradients, then runs a forward and a backward from the sum of the output, of a model or a pipeline.
template <typename Model>
void step(Model& model, const torch::Tensor& input) {
  clear_gradients(model);
  model->forward(input).sum().backward();
}

/// The loss of step(): the sum of the output.
torch::Tensor sum_loss(const torch::Tensor& output, const torch::Tensor& target);

/// Runs step() of a pipeline with sum_loss(). Does not clear the gradients.
void run_schedule(GPipe& pipe, const torch::Tensor& input);

/// Clears the gradients, then runs a step under the schedule, or a forward and a backward for kForward.
void step(GPipe& pipe, const torch::Tensor& input, const std::string& schedule);

}  // namespace gpipe::bench
