#include "examples/resnet18_mnist/task.h"

#include <torch/nn/functional/loss.h>
#include <torch/utils.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <numeric>
#include <utility>

#include "examples/common/codecs.h"
#include "examples/common/random.h"

namespace gpipe::examples::mnist {
namespace {

constexpr int kCell = 24;
constexpr int kLine = 1;

Example to_tensors(const LabelledImages& set) {
  const auto count = static_cast<std::int64_t>(set.count());
  auto pixels = torch::empty({count, 1, set.size.height, set.size.width}, torch::kUInt8);
  std::copy(set.pixels.begin(), set.pixels.end(), pixels.mutable_data_ptr<std::uint8_t>());
  auto labels = torch::empty({count}, torch::kUInt8);
  std::copy(set.labels.begin(), set.labels.end(), labels.mutable_data_ptr<std::uint8_t>());
  return {pixels.to(torch::kFloat).div_(255), labels.to(torch::kLong)};
}

}  // namespace

ClassificationTask::ClassificationTask(const LabelledImages& training, const LabelledImages& test, std::int64_t classes,
                                       std::int64_t batch_size, std::uint64_t seed, std::filesystem::path directory)
    : training_(to_tensors(training)),
      test_(to_tensors(test)),
      classes_(classes),
      batch_size_(batch_size),
      seed_(seed),
      directory_(std::move(directory)) {}

Examples ClassificationTask::training(int epoch, std::int64_t first) {
  std::vector<std::int64_t> order(static_cast<std::size_t>(training_images()));
  std::iota(order.begin(), order.end(), 0);
  Random(seed_, static_cast<std::uint64_t>(epoch)).shuffle(order);
  return [this, order = torch::tensor(order), next = first * batch_size_]() mutable -> std::optional<Example> {
    const auto count = std::min(batch_size_, order.size(0) - next);
    if (count <= 0) return std::nullopt;
    const auto chosen = order.narrow(0, next, count);
    next += count;
    return Example{training_.input.index_select(0, chosen), training_.target.index_select(0, chosen)};
  };
}

torch::Tensor ClassificationTask::loss(const torch::Tensor& logits, const torch::Tensor& labels) {
  return torch::nn::functional::cross_entropy(logits.to(torch::kFloat), labels);
}

std::vector<std::string> ClassificationTask::score_names() const { return {"accuracy", "test_loss"}; }

std::vector<double> ClassificationTask::validate(GPipe& pipe, int epoch, EventFile& events,
                                                 std::vector<std::filesystem::path>& files) {
  const auto count = test_.input.size(0);
  auto pairs = torch::zeros({classes_ * classes_}, torch::kLong);
  double loss_sum = 0;
  for (std::int64_t start = 0; start < count; start += batch_size_) {
    const auto size = std::min(batch_size_, count - start);
    const auto labels = test_.target.narrow(0, start, size);
    const auto logits = pipe->forward(test_.input.narrow(0, start, size)).cpu();
    loss_sum += loss(logits, labels).item<double>() * static_cast<double>(size);
    pairs += torch::bincount(labels * classes_ + logits.argmax(1), {}, classes_ * classes_);
  }
  const auto counts = pairs.view({classes_, classes_});
  char name[40];
  std::snprintf(name, sizeof name, "confusion_%03d.png", epoch);
  const auto picture = draw_confusion(counts);
  write_png(directory_ / name, picture);
  events.add_image("confusion", epoch, encode_png(picture), picture.width, picture.height);
  files.push_back(directory_ / name);
  return {counts.trace().item<double>() / static_cast<double>(count), loss_sum / static_cast<double>(count)};
}

Image draw_confusion(const torch::Tensor& counts) {
  const auto classes = static_cast<int>(counts.size(0));
  const auto shares = (counts.to(torch::kDouble) / counts.sum(1, true).clamp_min(1)).contiguous();
  const int side = classes * (kCell + kLine) + kLine;
  Image picture({side, side}, 1);
  std::fill(picture.pixels.begin(), picture.pixels.end(), 64);
  for (int row = 0; row < classes; ++row) {
    for (int column = 0; column < classes; ++column) {
      // The root makes the rare mistakes visible, which are what one looks for.
      const double brightness = std::sqrt(shares[row][column].item<double>());
      const auto grey = static_cast<std::uint8_t>(std::lround(255 * brightness));
      for (int y = 0; y < kCell; ++y) {
        std::fill_n(picture.at(column * (kCell + kLine) + kLine, row * (kCell + kLine) + kLine + y), kCell, grey);
      }
    }
  }
  return picture;
}

}  // namespace gpipe::examples::mnist
