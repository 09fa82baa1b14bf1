#include "examples/unet/task.h"

#include <torch/nn/functional/loss.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <utility>

#include "examples/common/codecs.h"
#include "examples/common/picture.h"
#include "examples/unet/metrics.h"

namespace gpipe::examples::unet {
namespace {

constexpr std::int64_t kPictureRows = 6;

}  // namespace

torch::Tensor segmentation_loss(const torch::Tensor& logits, const torch::Tensor& masks) {
  const auto cross_entropy = torch::nn::functional::binary_cross_entropy_with_logits(logits, masks);
  const auto probabilities = logits.sigmoid();
  const auto both = (probabilities * masks).sum({1, 2, 3});
  const auto total = probabilities.sum({1, 2, 3}) + masks.sum({1, 2, 3});
  return cross_entropy + 1 - ((2 * both + 1) / (total + 1)).mean();
}

SegmentationTask::SegmentationTask(Split split, Size size, LoaderOptions loading, std::filesystem::path directory)
    : split_(std::move(split)), size_(size), loading_(loading), directory_(std::move(directory)) {}

Examples SegmentationTask::training(int epoch, std::int64_t first) {
  auto options = loading_;
  options.shuffle = true;
  options.epoch = epoch;
  options.first_batch = first;
  return [loader = std::make_shared<Loader>(split_.training, size_, options)]() -> std::optional<Example> {
    auto batch = loader->next();
    if (!batch) return std::nullopt;
    return Example{batch->images, batch->masks};
  };
}

torch::Tensor SegmentationTask::loss(const torch::Tensor& logits, const torch::Tensor& masks) {
  return segmentation_loss(logits, masks);
}

std::vector<std::string> SegmentationTask::score_names() const { return {"val_dice", "val_iou", "val_loss"}; }

std::vector<double> SegmentationTask::validate(GPipe& pipe, int epoch, EventFile& events,
                                               std::vector<std::filesystem::path>& files) {
  Loader loader(split_.validation, size_, loading_);
  Metrics metrics;
  double loss_sum = 0;
  bool first = true;
  while (auto batch = loader.next()) {
    const auto logits = pipe->forward(batch->images);
    const auto masks = batch->masks.to(logits.device());
    const auto probabilities = logits.sigmoid();
    loss_sum += segmentation_loss(logits, masks).item<double>() * static_cast<double>(batch->images.size(0));
    metrics.add(probabilities, masks);
    if (!std::exchange(first, false)) continue;
    char name[32];
    std::snprintf(name, sizeof name, "epoch_%03d.png", epoch);
    const auto rows = std::min<std::int64_t>(kPictureRows, batch->images.size(0));
    const auto picture = draw_picture(batch->images.narrow(0, 0, rows), batch->masks.narrow(0, 0, rows),
                                      probabilities.narrow(0, 0, rows));
    write_png(directory_ / name, picture);
    events.add_image("validation", epoch, encode_png(picture), picture.width, picture.height);
    files.push_back(directory_ / name);
  }
  const auto scores = metrics.scores();
  return {scores.dice, scores.iou, loss_sum / static_cast<double>(split_.validation.size())};
}

}  // namespace gpipe::examples::unet
