#include "examples/unet/segmentation.h"

#include <torch/nn/functional/loss.h>

#include "examples/unet/data.h"
#include "models/unet.h"

namespace gpipe::examples::unet {

std::map<std::string, std::string> to_flags(const ModelOptions& options) {
  return {{"--classes", std::to_string(options.classes)},
          {"--depth", std::to_string(options.depth)},
          {"--channels", std::to_string(options.channels)}};
}

ModelOptions from_flags(const std::map<std::string, std::string>& flags) {
  const auto number = [&](const char* flag) { return std::stoi(flags.at(flag)); };
  return {.classes = number("--classes"), .depth = number("--depth"), .channels = number("--channels")};
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

torch::Tensor to_probabilities(const torch::Tensor& logits) { return logits.to(torch::kFloat).softmax(1); }

torch::Tensor to_labels(const torch::Tensor& probabilities) {
  return probabilities.argmax(1, /*keepdim=*/true).to(torch::kByte);
}

torch::Tensor one_hot(const torch::Tensor& labels, int classes) {
  const auto numbers = torch::arange(classes, labels.options()).view({1, classes, 1, 1});
  return (labels == numbers).to(torch::kFloat);
}

torch::Tensor count_pairs(const torch::Tensor& labels, const torch::Tensor& truth, int classes) {
  const auto pairs = truth.to(torch::kLong) * classes + labels;
  return torch::bincount(pairs.flatten(), {}, classes * classes).view({classes, classes});
}

std::vector<Score> to_scores(const torch::Tensor& pairs) {
  std::vector<Score> scores(1);
  const auto classes = static_cast<int>(pairs.size(0));
  for (int k = 1; k < classes; ++k) {
    const auto both = pairs[k][k].item<double>();
    const auto sum = (pairs[k].sum() + pairs.select(1, k).sum()).item<double>();
    scores.push_back(sum == 0 ? Score{1, 1} : Score{2 * both / sum, both / (sum - both)});
    scores[0].dice += scores.back().dice / (classes - 1);
    scores[0].iou += scores.back().iou / (classes - 1);
  }
  return scores;
}

}  // namespace gpipe::examples::unet
