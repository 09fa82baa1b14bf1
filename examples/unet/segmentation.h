#pragma once

#include <torch/types.h>

#include <cstdint>

namespace gpipe::examples::unet {

// The meaning of a U-Net's output. With two classes it has one channel, the logit of class 1; with more classes, one
// channel per class.
//   logits         [n, 1 or classes, h, w]
//   probabilities  [n, classes, h, w]; they sum to 1 over the classes
//   labels         [n, 1, h, w], uint8: the class of each pixel

inline std::int64_t output_channels(int classes) { return classes == 2 ? 1 : classes; }

/// Cross-entropy plus 1 - Dice. Dice is the overlap of the probabilities with the labels (Milletari et al.,
/// arXiv:1606.04797, without the squares), as the mean over images and all classes except 0. Each count is one pixel
/// higher, so that an absent class can have a Dice of 1. Both parts are means over images of equal size, so the loss of a
/// mini-batch is the mean of its micro-batches' losses, weighted by images.
torch::Tensor segmentation_loss(const torch::Tensor& logits, const torch::Tensor& labels);

torch::Tensor to_probabilities(const torch::Tensor& logits);

/// The most probable class of each pixel.
torch::Tensor to_labels(const torch::Tensor& probabilities);

/// Colours [n, 3, h, w] with values 0 to 1: the mean of the classes' colours, weighted by their probability. Class 1 of
/// two is white.
torch::Tensor paint(const torch::Tensor& probabilities);
/// Labels as probabilities that are 0 or 1.
torch::Tensor one_hot(const torch::Tensor& labels, int classes);

}  // namespace gpipe::examples::unet
