#include "examples/unet/task.h"

#include <algorithm>
#include <cstdio>
#include <memory>
#include <string>
#include <utility>

#include "examples/common/picture.h"
#include "examples/unet/metrics.h"
#include "examples/unet/segmentation.h"

namespace gpipe::examples::unet {
namespace {

constexpr std::int64_t kPictureRows = 6;

}  // namespace

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

std::vector<std::string> SegmentationTask::score_names() const {
  std::vector<std::string> names = {"val_dice", "val_iou", "val_loss"};
  for (int k = 1; k < loading_.classes && loading_.classes > 2; ++k) names.push_back("val_dice_" + std::to_string(k));
  return names;
}

std::vector<double> SegmentationTask::validate(GPipe& pipe, int epoch, EventFile& events,
                                               std::vector<std::filesystem::path>& files) {
  auto options = loading_;
  options.augment = false;
  Loader loader(split_.validation, size_, options);
  Metrics metrics(options.classes);
  double loss_sum = 0;
  bool first = true;
  while (auto batch = loader.next()) {
    const auto logits = pipe->forward(batch->images).cpu();
    loss_sum += segmentation_loss(logits, batch->masks).item<double>() * static_cast<double>(batch->images.size(0));
    const auto probabilities = to_probabilities(logits);
    metrics.add(to_labels(probabilities), batch->masks);
    if (!std::exchange(first, false)) continue;
    char name[32];
    std::snprintf(name, sizeof name, "epoch_%03d.png", epoch);
    const auto rows = std::min<std::int64_t>(kPictureRows, batch->images.size(0));
    const auto truth = one_hot(batch->masks.narrow(0, 0, rows), options.classes);
    const auto picture =
        draw_picture({batch->images.narrow(0, 0, rows), paint(truth), paint(probabilities.narrow(0, 0, rows))});
    show_picture(picture, directory_ / name, "validation", epoch, events, files);
  }
  const auto scores = metrics.scores();
  const auto all = mean(scores.pixels);
  std::vector<double> values = {all.dice, all.iou, loss_sum / static_cast<double>(split_.validation.size())};
  for (const auto& score : scores.pixels) {
    if (options.classes > 2) values.push_back(score.dice);
  }
  return values;
}

}  // namespace gpipe::examples::unet
