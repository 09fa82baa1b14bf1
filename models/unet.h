#pragma once

#include <torch/arg.h>
#include <torch/nn/modules/container/sequential.h>

#include <cstdint>

namespace gpipe::models {

/// How a U-Net's decoder doubles the resolution.
enum class Upsampling {
  kTransposed,  ///< a transposed convolution, kernel and stride 2
  kLinear,      ///< a 1x1 convolution that halves the channels, then bilinear or trilinear interpolation
};

struct UNetOptions {
  /// Channels of the input image.
  TORCH_ARG(std::int64_t, in_channels) = 3;
  /// Channels of the output, one a class: logits, without a final activation.
  TORCH_ARG(std::int64_t, out_channels) = 1;
  /// How often the resolution is halved; the number of skips.
  TORCH_ARG(std::int64_t, depth) = 4;
  /// Channels at full resolution. They double with each halving.
  TORCH_ARG(std::int64_t, base_channels) = 64;
  /// Convolutions (3x3, batch norm, ReLU) in each block.
  TORCH_ARG(std::int64_t, convolutions) = 2;
  /// Probability that a channel is dropped at the end of each block; 0 leaves the dropout layers out.
  TORCH_ARG(double, dropout) = 0.0;
  /// 2 for inputs (N, C, H, W), 3 for (N, C, D, H, W).
  TORCH_ARG(std::int64_t, dims) = 2;
  TORCH_ARG(Upsampling, upsampling) = Upsampling::kTransposed;
};

/// A U-Net as a flat Sequential, which can be cut between any two layers: its long skips are stashed and popped, in a
/// namespace of this call's own, so that several U-Nets may follow each other in one model. The default has the 31
/// million parameters of the usual U-Net with batch norm.
///
/// Any spatial size of at least 1 will do, and the output has the input's: odd sizes are rounded up when halved, and
/// cropped to the skip's when doubled again.
///
/// The layers by name, which is stable because it is the prefix of the state's keys ("down1_conv1.weight"), with levels
/// i = 1 (full resolution) .. depth and convolutions j = 1 .. convolutions:
///
///   for i up:    BLOCK(down{i}), down{i}_stash, down{i}_pool
///   then:        BLOCK(bottom)
///   for i down:  up{i}_reduce (kLinear only), up{i}_upsample, up{i}_join, BLOCK(up{i})
///   then:        head (a 1x1 convolution)
///
/// where BLOCK(b) is, for each j, b_conv{j}, b_norm{j}, b_relu{j}; then b_dropout, if any.
///
/// Errors: std::invalid_argument that names the option and its value.
torch::nn::Sequential unet(const UNetOptions& options = {});

}  // namespace gpipe::models
