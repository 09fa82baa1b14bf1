#include "examples/resnet18_mnist/task.h"

#include <torch/nn/functional/loss.h>
#include <torch/utils.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "examples/common/processes.h"
#include "examples/common/random.h"
#include "examples/resnet18_mnist/confusion.h"

namespace gpipe::examples::mnist {
namespace {

Example to_tensors(const LabelledImages& set) {
  const auto count = static_cast<std::int64_t>(set.count());
  auto pixels = torch::empty({count, 1, set.size.height, set.size.width}, torch::kUInt8);
  std::copy(set.pixels.begin(), set.pixels.end(), pixels.mutable_data_ptr<std::uint8_t>());
  auto labels = torch::empty({count}, torch::kUInt8);
  std::copy(set.labels.begin(), set.labels.end(), labels.mutable_data_ptr<std::uint8_t>());
  return {pixels.to(torch::kFloat).div_(255), labels.to(torch::kLong)};
}

}  // namespace

std::vector<ScoreName> classification_scores() { return {{"accuracy", "accuracy/test"}, {"test_loss", "loss/test"}}; }

ClassificationTask::ClassificationTask(const LabelledImages& training, const LabelledImages& test, std::int64_t classes,
                                       std::int64_t batch_size, std::uint64_t seed, std::shared_ptr<Ranks> ranks)
    : training_(to_tensors(training)),
      test_(to_tensors(test)),
      classes_(classes),
      batch_size_(batch_size),
      seed_(seed),
      ranks_(std::move(ranks)) {}

Examples ClassificationTask::training(int epoch, std::int64_t first) {
  std::vector<std::int64_t> order(static_cast<std::size_t>(training_images()));
  std::iota(order.begin(), order.end(), 0);
  Random(seed_, static_cast<std::uint64_t>(epoch)).shuffle(order);
  return [this, order = torch::tensor(order), next = first * batch_size_]() mutable -> std::optional<Example> {
    const auto count = std::min(batch_size_, order.size(0) - next);
    if (count <= 0) return std::nullopt;
    const auto [begin, end] = part_of(ranks_, count);
    const auto chosen = order.slice(0, next + begin, next + end);
    next += count;
    return Example{training_.input.index_select(0, chosen), training_.target.index_select(0, chosen)};
  };
}

torch::Tensor ClassificationTask::loss(const torch::Tensor& logits, const torch::Tensor& labels) const {
  return torch::nn::functional::cross_entropy(logits.to(torch::kFloat), labels);
}

std::vector<double> ClassificationTask::validate(GPipe& pipe, const ShowPicture& show, const Stops& stops) {
  const auto count = test_.input.size(0);
  auto pairs = torch::zeros({classes_ * classes_}, torch::kLong);
  double loss_sum = 0;
  for (std::int64_t start = 0; start < count; start += batch_size_) {
    if (stops()) return {};
    const auto [begin, end] = part_of(ranks_, std::min(batch_size_, count - start));
    const auto labels = test_.target.slice(0, start + begin, start + end);
    const auto logits = pipe->forward(test_.input.slice(0, start + begin, start + end)).cpu();
    if (begin == end) continue;  // the mean of no losses is not a number
    loss_sum += loss(logits, labels).item<double>() * static_cast<double>(end - begin);
    pairs += torch::bincount(labels * classes_ + logits.argmax(1), {}, classes_ * classes_);
  }
  const auto* own = pairs.const_data_ptr<std::int64_t>();
  const auto counts = pipe->sum_over_replicas({own, own + pairs.numel()});
  const auto picture = draw_confusion({counts.begin(), counts.end()}, static_cast<int>(classes_));
  show(picture, "confusion", "confusion/test");
  double right = 0;
  for (std::int64_t k = 0; k < classes_; ++k) right += counts[k * classes_ + k];
  loss_sum = pipe->sum_over_replicas({loss_sum}).front();
  return {right / static_cast<double>(count), loss_sum / static_cast<double>(count)};
}

}  // namespace gpipe::examples::mnist
