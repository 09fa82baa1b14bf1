#include "examples/unet/task.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "examples/common/picture.h"
#include "examples/common/processes.h"
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

void SegmentationTask::draw(GPipe& pipe, const Batch& batch, const torch::Tensor& probabilities,
                            const ShowPicture& show) const {
  const auto whole = std::min(loading_.batch_size, static_cast<std::int64_t>(split_.validation.size()));
  const auto begin = part_of(loading_.ranks, whole).first;
  const auto rows = std::clamp<std::int64_t>(kPictureRows - begin, 0, batch.images.size(0));
  const auto truth = one_hot(batch.masks.narrow(0, 0, rows), loading_.classes);
  const std::vector<Column> columns = {{"image", join_parts(pipe, batch.images.narrow(0, 0, rows))},
                                       {"mask", join_parts(pipe, paint(truth))},
                                       {"prediction", join_parts(pipe, paint(probabilities.narrow(0, 0, rows)))}};
  if (is_first(loading_.ranks)) show(draw_picture(columns), "epoch", "predictions/val");
}

std::vector<double> SegmentationTask::validate(GPipe& pipe, const ShowPicture& show, const Stops& stops) {
  auto options = loading_;
  options.augment = false;
  Loader loader(split_.validation, size_, options);
  Metrics metrics(options.classes);
  double loss_sum = 0;
  bool first = true;
  while (auto batch = loader.next()) {
    if (stops()) return {};
    const auto logits = pipe->forward(batch->images).cpu();
    const auto probabilities = to_probabilities(logits);
    if (std::exchange(first, false)) draw(pipe, *batch, probabilities, show);
    const auto images = batch->images.size(0);
    if (images == 0) continue;  // the mean of no losses is not a number
    loss_sum += segmentation_loss(logits, batch->masks).item<double>() * static_cast<double>(images);
    metrics.add(to_labels(probabilities), batch->masks);
  }
  const auto scores = Metrics(options.classes, pipe->sum_over_replicas(metrics.sums())).scores();
  loss_sum = pipe->sum_over_replicas({loss_sum}).front();
  const auto all = mean(scores.pixels);
  std::vector<double> values = {all.dice, all.iou, loss_sum / static_cast<double>(split_.validation.size())};
  for (const auto& score : scores.pixels) {
    if (options.classes > 2) values.push_back(score.dice);
  }
  return values;
}

}  // namespace gpipe::examples::unet
