#pragma once

#include <torch/nn/modules/container/sequential.h>

#include <CLI/App.hpp>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace gpipe::examples::unet {

/// Which U-Net to train. Snapshots store these options, so that programs that use the model need no flags for it.
struct ModelOptions {
  int classes = 2;
  std::int64_t depth = 3;
  std::int64_t channels = 8;  ///< at full resolution
};

/// Returns the options as flags with their values.
std::map<std::string, std::string> to_flags(const ModelOptions& options);
/// The inverse of to_flags(). Errors: std::logic_error for a flag that is missing or has another value than a training.
ModelOptions from_flags(const std::map<std::string, std::string>& flags);

torch::nn::Sequential make_model(const ModelOptions& options);

// The model's output has a channel per class.
//   logits  [n, classes, h, w]
//   labels  [n, 1, h, w], uint8: the class of each pixel

/// Cross-entropy plus 1 - Dice. Dice is the overlap of the probabilities with the labels (Milletari et al.,
/// arXiv:1606.04797, without the squares), as the mean over images and all classes except 0. Each count is one pixel
/// higher, so that an absent class can have a Dice of 1. Both parts are means over images of equal size, so the loss of
/// a mini-batch is the mean of its micro-batches' losses, weighted by images.
torch::Tensor segmentation_loss(const torch::Tensor& logits, const torch::Tensor& labels);

/// The most probable class of each pixel, of logits or probabilities.
torch::Tensor to_labels(const torch::Tensor& values);

/// Labels as probabilities that are 0 or 1.
torch::Tensor one_hot(const torch::Tensor& labels, int classes);

/// Returns the number of pixels of each true class and predicted class, [classes, classes]. Counts of several images add
/// up.
torch::Tensor count_pairs(const torch::Tensor& labels, const torch::Tensor& truth, int classes);

/// Returns how well predicted labels match the true ones, [classes, 2]: Dice and IoU of each class, for class 0 the mean
/// of the others. With A the predicted pixels of a class and B the true ones, Dice = 2 |A and B| / (|A| + |B|) and
/// IoU = |A and B| / |A or B|. Both are 1 if A and B are empty.
torch::Tensor to_scores(const torch::Tensor& pairs);

}  // namespace gpipe::examples::unet
