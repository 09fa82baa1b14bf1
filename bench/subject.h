#pragma once

#include <torch/nn/modules/container/sequential.h>
#include <torch/types.h>

#include <cstdint>
#include <string>
#include <vector>

namespace gpipe::bench {

/// A model that benchmarks run, and one mini-batch for it.
///
///   mlp        16 layers, each Linear(1024, 1024) and ReLU; 1,024 rows
///   unet       models::unet, depth 4, 16 channels at full resolution; 16 images of 3x96x96
///   resnet18   models::resnet18; 16 images of 3x64x64 a micro-batch
///   resnet50   models::resnet50; the same: with fewer, PyTorch has no fast kernel for its 1x1 convolutions
///   encoder    8 blocks of a transformer's encoder, 256 wide, 4 heads; 32 sequences of 64
struct Subject {
  std::string name;
  torch::nn::Sequential model;
  torch::Tensor input;
  std::int64_t split_size;  ///< samples of a micro-batch
};

/// The model with fresh weights, and a mini-batch of so many equal micro-batches. Errors: std::invalid_argument for
/// another name, or where the mini-batch cannot be cut so.
Subject subject(const std::string& name, int chunks);

/// Forgets the gradients, then goes forward through a model or a pipeline and back from the sum of its output.
template <typename Model>
void step(Model& model, const torch::Tensor& input) {
  for (auto& parameter : model->parameters()) parameter.mutable_grad().reset();
  model->forward(input).sum().backward();
}

/// The models of Subject; and those of them that peers are measured with.
extern const std::vector<std::string> kSubjects;
extern const std::vector<std::string> kPeerSubjects;

}  // namespace gpipe::bench
