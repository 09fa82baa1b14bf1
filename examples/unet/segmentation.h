#pragma once

#include <torch/types.h>

#include <cstdint>

namespace gpipe::examples::unet {

// What a U-Net's output means. With two classes it has one channel, the logit of class 1; with more, one a class.
//   logits         [n, 1 or classes, h, w]
//   probabilities  [n, classes, h, w], which sum to 1 over the classes
//   labels         [n, 1, h, w], uint8: the class of each pixel

inline std::int64_t output_channels(int classes) { return classes == 2 ? 1 : classes; }

/// Cross-entropy plus 1 - Dice, where Dice is the mean over images and classes but 0 of what the probabilities overlap
/// with the labels (Milletari et al., arXiv:1606.04797, without the squares), one pixel more in each count, so that
/// what is nowhere can be predicted well.
torch::Tensor segmentation_loss(const torch::Tensor& logits, const torch::Tensor& labels);

torch::Tensor to_probabilities(const torch::Tensor& logits);

/// The most probable class of each pixel.
torch::Tensor to_labels(const torch::Tensor& probabilities);

/// Probabilities as colours [n, 3, h, w], 0 to 1: each class's colour (white for class 1 of two), as much as it is
/// probable.
torch::Tensor paint(const torch::Tensor& probabilities);
/// Labels as probabilities of 0 and 1.
torch::Tensor one_hot(const torch::Tensor& labels, int classes);

}  // namespace gpipe::examples::unet
