#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace gpipe::examples::unet {

/// How well predicted masks cover true ones, over any number of batches. Dice = 2 |A and B| / (|A| + |B|), IoU =
/// |A and B| / |A or B|; both are 1 where both masks are empty.
class Metrics {
 public:
  /// Of all pixels together, and the mean over the images. 0 while no image was added.
  struct Scores {
    double dice = 0;
    double iou = 0;
    double image_dice = 0;
    double image_iou = 0;
  };

  /// [n, ...] each, of equal shape, any floating or boolean type, on any device. Values above 0.5 are foreground: so
  /// pass probabilities, not logits. Throws std::invalid_argument for shapes that differ.
  void add(const at::Tensor& predicted, const at::Tensor& truth);
  Scores scores() const;

 private:
  int64_t images_ = 0;
  int64_t both_ = 0;  // pixels in the prediction and in the truth
  int64_t sum_ = 0;   // pixels in the prediction plus pixels in the truth
  double image_dice_ = 0;
  double image_iou_ = 0;
};

}  // namespace gpipe::examples::unet
