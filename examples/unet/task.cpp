#include "examples/unet/task.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "examples/common/picture.h"
#include "examples/unet/metrics.h"
#include "examples/unet/segmentation.h"

namespace gpipe::examples::unet {
namespace {

constexpr std::int64_t kPictureRows = 6;

}  // namespace

std::vector<ScoreName> segmentation_scores(int classes) {
  std::vector<ScoreName> scores = {{"val_dice", "dice/val"}, {"val_iou", "iou/val"}, {"val_loss", "loss/val"}};
  for (int k = 1; k < classes && classes > 2; ++k) {
    scores.push_back({absl::StrCat("val_dice_", k), absl::StrCat("dice/val_", k)});
  }
  return scores;
}

SegmentationTask::SegmentationTask(Split split, Size size, LoaderOptions loading)
    : split_(std::move(split)), size_(size), loading_(loading) {}

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

torch::Tensor SegmentationTask::loss(const torch::Tensor& logits, const torch::Tensor& masks) const {
  return segmentation_loss(logits, masks);
}

std::vector<double> SegmentationTask::validate(GPipe& pipe, const ShowPicture& show, const Stops& stops) {
  auto options = loading_;
  options.augment = false;
  options.ranks = nullptr;
  Loader loader(split_.validation, size_, options);
  Metrics metrics(options.classes);
  double loss_sum = 0;
  bool first = true;
  while (auto batch = loader.next()) {
    if (stops()) return {};
    const auto logits = pipe->forward(batch->images).cpu();
    loss_sum += segmentation_loss(logits, batch->masks).item<double>() * static_cast<double>(batch->images.size(0));
    const auto probabilities = to_probabilities(logits);
    metrics.add(to_labels(probabilities), batch->masks);
    if (!std::exchange(first, false)) continue;
    const auto rows = std::min<std::int64_t>(kPictureRows, batch->images.size(0));
    const auto truth = one_hot(batch->masks.narrow(0, 0, rows), options.classes);
    const auto picture = draw_picture({{"image", batch->images.narrow(0, 0, rows)},
                                       {"mask", paint(truth)},
                                       {"prediction", paint(probabilities.narrow(0, 0, rows))}});
    show(picture, "epoch", "predictions/val");
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
