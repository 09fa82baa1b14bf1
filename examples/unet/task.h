#pragma once

#include <vector>

#include "examples/common/task.h"
#include "examples/unet/carvana.h"
#include "examples/unet/loader.h"

namespace gpipe::examples::unet {

/// The scores of a validation: Dice, IoU and loss; with more than two classes also the Dice of each.
std::vector<ScoreName> segmentation_scores(int classes);

/// Learns to segment images [n, 3, h, w] with values 0 to 1 into logits; see segmentation.h.
class SegmentationTask : public Task {
 public:
  /// `loading` applies to both parts, except that the order and the epoch are set for each epoch, and validation is
  /// never augmented. Its picture shows the first validation images.
  SegmentationTask(Split split, Size size, LoaderOptions loading);

  std::int64_t training_images() const override { return static_cast<std::int64_t>(split_.training.size()); }
  Examples training(int epoch, std::int64_t first) override;
  torch::Tensor loss(const torch::Tensor& logits, const torch::Tensor& masks) const override;
  std::vector<ScoreName> scores() const override { return segmentation_scores(loading_.classes); }
  std::vector<double> validate(GPipe& pipe, const ShowPicture& show, const Stops& stops) override;

 private:
  /// Shows the first images of the first mini-batch. `batch` is this replica's part of it.
  void draw(GPipe& pipe, const Batch& batch, const torch::Tensor& probabilities, const ShowPicture& show) const;

  const Split split_;
  const Size size_;
  const LoaderOptions loading_;
};

}  // namespace gpipe::examples::unet
