#include "examples/unet/segmentation.h"

#include <torch/nn/functional/loss.h>

#include <stdexcept>

#include "absl/strings/numbers.h"
#include "models/unet.h"

namespace gpipe::examples::unet {

std::map<std::string, std::string> to_flags(const ModelOptions& options) {
  return {{"--classes", std::to_string(options.classes)},
          {"--depth", std::to_string(options.depth)},
          {"--channels", std::to_string(options.channels)}};
}

ModelOptions from_flags(const std::map<std::string, std::string>& flags) {
  const auto number = [&](const char* flag, int least) {
    int value = 0;
    if (absl::SimpleAtoi(flags.at(flag), &value) && value >= least) return value;
    throw std::invalid_argument(std::string(flag) + " is '" + flags.at(flag) + "'");
  };
  return {.classes = number("--classes", 2), .depth = number("--depth", 1), .channels = number("--channels", 1)};
}

torch::nn::Sequential make_model(const ModelOptions& options) {
  return models::unet(
      models::UNetOptions().out_channels(options.classes).depth(options.depth).base_channels(options.channels));
}

torch::Tensor segmentation_loss(const torch::Tensor& logits, const torch::Tensor& labels) {
  namespace F = torch::nn::functional;
  const auto values = logits.to(torch::kFloat);
  const auto things = values.size(1) - 1;
  const auto cross_entropy = F::cross_entropy(values, labels.squeeze(1).to(torch::kLong));
  const auto predicted = values.softmax(1).narrow(1, 1, things);
  const auto truth = one_hot(labels, static_cast<int>(values.size(1))).narrow(1, 1, things);
  const auto both = (predicted * truth).sum({2, 3});
  const auto total = predicted.sum({2, 3}) + truth.sum({2, 3});
  return cross_entropy + 1 - ((2 * both + 1) / (total + 1)).mean();
}

torch::Tensor to_labels(const torch::Tensor& values) { return values.argmax(1, /*keepdim=*/true).to(torch::kByte); }

torch::Tensor one_hot(const torch::Tensor& labels, int classes) {
  const auto numbers = torch::arange(classes, labels.options()).view({1, classes, 1, 1});
  return (labels == numbers).to(torch::kFloat);
}

torch::Tensor count_pairs(const torch::Tensor& labels, const torch::Tensor& truth, int classes) {
  const auto pairs = truth.to(torch::kLong) * classes + labels;
  return torch::bincount(pairs.flatten(), {}, classes * classes).view({classes, classes});
}

torch::Tensor to_scores(const torch::Tensor& pairs) {
  const auto counts = pairs.to(torch::kDouble);
  const auto both = counts.diagonal(), sum = counts.sum(0) + counts.sum(1);
  const auto dice = torch::where(sum > 0, 2 * both / sum, 1), iou = torch::where(sum > 0, both / (sum - both), 1);
  auto scores = torch::stack({dice, iou}, 1);
  scores[0].copy_(scores.slice(0, 1).mean(0));
  return scores;
}

}  // namespace gpipe::examples::unet
