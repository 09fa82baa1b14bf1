#pragma once

#include <torch/arg.h>
#include <torch/nn/modules/container/sequential.h>

#include <cstdint>

#include "gpipe/api.h"

namespace gpipe::models {

struct ResNetOptions {
  /// Number of outputs, one per class: logits, without a final activation.
  TORCH_ARG(std::int64_t, num_classes) = 1000;
  /// Channels of the input image.
  TORCH_ARG(std::int64_t, in_channels) = 3;
  /// For small images (MNIST, CIFAR): a stem of a 3x3 convolution, not of a 7x7 one of stride 2 with pooling.
  TORCH_ARG(bool, small_images) = false;
};

/// ResNets (He et al., arXiv:1512.03385) as flat Sequentials that can be cut between any two layers. The shortcut of a
/// block is stashed and popped, in a new namespace per call. The models have the layers, initial distributions and
/// parameter counts of torchvision's models of the same names ("v1.5": stride 2 in a bottleneck's 3x3 convolution). They
/// map (N, in_channels, H, W) with H, W >= 1 to (N, num_classes).
///
/// Layer names are stable, because they are the prefixes of the state's keys ("layer1_0_conv1.weight"). With groups
/// g = 1..4, blocks b from 0, and convolutions j = 1..n (n = 2; 3 in ResNet-50's bottlenecks) they are:
///
///   conv1, bn1, relu, maxpool (not with small_images)
///   for each g and b, with the prefix layer{g}_{b}_:
///     stash, conv1, bn1, relu1, .., conv{n}, bn{n}, join, relu{n}
///   avgpool, flatten, fc
///
/// The first block of a group can project its shortcut by a 1x1 convolution and batch norm. The projection is on the
/// side of the skip where the tensor to store and send is smaller. It is in the stash where it halves the tensor
/// (groups 2 to 4, "layer2_0_stash.downsample.0.weight"), and in the join where it enlarges the tensor four times
/// (group 1 of the bottlenecks, "layer1_0_join.downsample.0.weight").
///
/// Errors: std::invalid_argument with the option and its value.
GPIPE_API torch::nn::Sequential resnet18(const ResNetOptions& options = {});
GPIPE_API torch::nn::Sequential resnet50(const ResNetOptions& options = {});

}  // namespace gpipe::models
