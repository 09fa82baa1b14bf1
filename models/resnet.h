#pragma once

#include <torch/arg.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/types.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>

namespace gpipe::models {

struct ResNetOptions {
  /// Outputs, one a class: logits, without a final activation.
  TORCH_ARG(std::int64_t, num_classes) = 1000;
  /// Channels of the input image.
  TORCH_ARG(std::int64_t, in_channels) = 3;
  /// Keeps small images (MNIST, CIFAR) at full resolution in the stem: a 3x3 convolution of stride 1 and no pooling,
  /// instead of 7x7 of stride 2 and pooling by 2.
  TORCH_ARG(bool, small_images) = false;
};

/// ResNets (He et al., arXiv:1512.03385) as flat Sequentials, which can be cut between any two layers: a block's
/// shortcut is stashed and popped, in a namespace of this call's own. They compute what torchvision's models of the
/// same names do (those of stride 2 in a bottleneck's 3x3 convolution, "v1.5"), start from the same distributions, and
/// have the published parameter counts. Any image size of at least 1 will do: (N, in_channels, H, W) to
/// (N, num_classes).
///
/// The layers by name, which is stable because it is the prefix of the state's keys ("layer1_0_conv1.weight"), with
/// groups g = 1..4, blocks b from 0, and convolutions j = 1..n (n = 2, or 3 in the bottlenecks of ResNet-50 and up):
///
///   conv1, bn1, relu, maxpool (not with small_images)
///   for g, b, with the prefix layer{g}_{b}_:
///     stash, conv1, bn1, relu1, .., conv{n}, bn{n}, join, relu{n}
///   avgpool, flatten, fc
///
/// The first block of a group may project its shortcut by a 1x1 convolution and batch norm, on whichever side of the
/// skip leaves less to hold and to send: before the stash where the projection shrinks its tensor (groups 2 to 4, by
/// half), in the join where it would grow it (group 1 of the bottlenecks, fourfold). Keys:
/// "layer2_0_stash.downsample.0.weight", "layer1_0_join.downsample.0.weight".
///
/// Errors: std::invalid_argument that names the option and its value.
torch::nn::Sequential resnet18(const ResNetOptions& options = {});
torch::nn::Sequential resnet34(const ResNetOptions& options = {});
torch::nn::Sequential resnet50(const ResNetOptions& options = {});
torch::nn::Sequential resnet101(const ResNetOptions& options = {});
torch::nn::Sequential resnet152(const ResNetOptions& options = {});

/// The key, in the models above, of what torchvision's ResNets keep under `key`:
///
///   layer1.{b}.downsample.{rest}     layer1_{b}_join.downsample.{rest}
///   layer{g}.{b}.downsample.{rest}   layer{g}_{b}_stash.downsample.{rest}
///   layer{g}.{b}.{rest}              layer{g}_{b}_{rest}
///   any other                        the same
std::string from_torchvision(const std::string& key);

/// Gives a model, or a pipeline of one, the state of torchvision's ResNet of the same depth: load_torchvision(*model,
/// state). Values are copied, to the model's devices and types. Counters of batches (num_batches_tracked), which older
/// states lack, may be missing: they become 0.
///
/// Errors: std::invalid_argument that names the first key that the model does not have, or of another shape, or that
/// is missing; then nothing was changed.
void load_torchvision(torch::nn::Module& model, const std::map<std::string, torch::Tensor>& state);

/// The same from a file that Python wrote by `torch.save(dict(model.state_dict()), path)`; without `dict`, it would be
/// an OrderedDict, which LibTorch does not read.
///
/// Errors: also std::runtime_error that names the file and says why it cannot be read.
void load_torchvision(torch::nn::Module& model, const std::filesystem::path& path);

}  // namespace gpipe::models
