#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "examples/common/trainer.h"
#include "examples/unet/carvana.h"
#include "examples/unet/loader.h"

namespace gpipe::examples::unet {

/// Learning to mask what the samples show: images [n, 3, h, w], values 0 to 1, to logits (see segmentation.h).
class SegmentationTask : public Task {
 public:
  /// Batches as `loading` says, but for order and epoch; validation is never augmented. Draws a picture of the first
  /// validation images each epoch into the directory.
  SegmentationTask(Split split, Size size, LoaderOptions loading, std::filesystem::path directory);

  std::int64_t training_images() const override { return static_cast<std::int64_t>(split_.training.size()); }
  Examples training(int epoch, std::int64_t first) override;
  torch::Tensor loss(const torch::Tensor& logits, const torch::Tensor& masks) override;
  std::vector<std::string> score_names() const override;
  std::vector<double> validate(GPipe& pipe, int epoch, EventFile& events,
                               std::vector<std::filesystem::path>& files) override;

 private:
  const Split split_;
  const Size size_;
  const LoaderOptions loading_;
  const std::filesystem::path directory_;
};

}  // namespace gpipe::examples::unet
