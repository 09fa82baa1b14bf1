#pragma once

#include <torch/arg.h>
#include <torch/nn/modules/container/sequential.h>

#include <cstdint>

#include "gpipe/api.h"

namespace gpipe::models {

struct UNetOptions {
  /// Channels of the input image.
  TORCH_ARG(std::int64_t, in_channels) = 3;
  /// Channels of the output, one per class: logits, without a final activation.
  TORCH_ARG(std::int64_t, out_channels) = 1;
  /// How many times the resolution is halved. Also the number of skips.
  TORCH_ARG(std::int64_t, depth) = 4;
  /// Channels at full resolution. They double with each halving.
  TORCH_ARG(std::int64_t, base_channels) = 64;
  /// Probability that a channel is dropped at the end of each block; 0 leaves the dropout layers out.
  TORCH_ARG(double, dropout) = 0.0;
};

/// Makes a U-Net for images (N, C, H, W) as a flat Sequential that can be cut between any two layers. Its skip connections
/// are stashed and popped in a new namespace, so that a model can contain several U-Nets. With default options it has 31
/// million parameters, like the usual U-Net with batch norm.
///
/// Spatial sizes must be at least 1. The output has the size of the input: odd sizes are rounded up when halved, and
/// cropped to the size of the skip when doubled.
///
/// Layer names are stable, because they are the prefixes of the state's keys ("down1_conv1.weight"). With levels i = 1
/// (full resolution) .. depth they are:
///
///   for i up:    BLOCK(down{i}), down{i}_stash, down{i}_pool
///   then:        BLOCK(bottom)
///   for i down:  up{i}_upsample (a transposed convolution), up{i}_join, BLOCK(up{i})
///   then:        head (a 1x1 convolution)
///
/// where BLOCK(b) is b_conv{j}, b_norm{j}, b_relu{j} for j = 1, 2, then b_dropout if dropout > 0.
///
/// Errors: std::invalid_argument with the option and its value.
GPIPE_API torch::nn::Sequential unet(const UNetOptions& options = {});

}  // namespace gpipe::models
