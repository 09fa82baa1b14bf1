#include "examples/unet/segmentation.h"

#include <torch/nn/functional/loss.h>

#include <vector>

#include "examples/unet/classes.h"

namespace gpipe::examples::unet {
namespace {

torch::Tensor class_colors(std::int64_t classes) {
  if (classes == 2) return torch::tensor({0.f, 0.f, 0.f, 1.f, 1.f, 1.f}).view({2, 3});
  std::vector<float> parts;
  for (std::int64_t k = 0; k < classes; ++k) {
    const Color color = class_color(static_cast<Label>(k));
    for (const int part : {color.red, color.green, color.blue}) parts.push_back(static_cast<float>(part) / 255);
  }
  return torch::tensor(parts).view({classes, 3});
}

}  // namespace

torch::Tensor segmentation_loss(const torch::Tensor& logits, const torch::Tensor& labels) {
  namespace F = torch::nn::functional;
  const auto values = logits.to(torch::kFloat);
  torch::Tensor cross_entropy, predicted, truth;
  if (values.size(1) == 1) {
    truth = labels.to(torch::kFloat);
    cross_entropy = F::binary_cross_entropy_with_logits(values, truth);
    predicted = values.sigmoid();
  } else {
    const auto things = values.size(1) - 1;
    cross_entropy = F::cross_entropy(values, labels.squeeze(1).to(torch::kLong));
    predicted = values.softmax(1).narrow(1, 1, things);
    truth = one_hot(labels, static_cast<int>(values.size(1))).narrow(1, 1, things);
  }
  const auto both = (predicted * truth).sum({2, 3});
  const auto total = predicted.sum({2, 3}) + truth.sum({2, 3});
  return cross_entropy + 1 - ((2 * both + 1) / (total + 1)).mean();
}

torch::Tensor to_probabilities(const torch::Tensor& logits) {
  const auto values = logits.to(torch::kFloat);
  if (values.size(1) > 1) return values.softmax(1);
  const auto thing = values.sigmoid();
  return torch::cat({1 - thing, thing}, 1);
}

torch::Tensor to_labels(const torch::Tensor& probabilities) {
  return probabilities.argmax(1, /*keepdim=*/true).to(torch::kByte);
}

torch::Tensor paint(const torch::Tensor& probabilities) {
  const auto colors = class_colors(probabilities.size(1)).to(probabilities.device());
  return torch::einsum("nkhw,kc->nchw", {probabilities, colors});
}

torch::Tensor one_hot(const torch::Tensor& labels, int classes) {
  const auto numbers = torch::arange(classes, labels.options()).view({1, classes, 1, 1});
  return (labels == numbers).to(torch::kFloat);
}

}  // namespace gpipe::examples::unet
