#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace gpipe::examples::unet {

/// How well predicted masks cover true ones. Of the pixels A predicted to be of a class and the pixels B that are:
/// Dice = 2 |A and B| / (|A| + |B|), IoU = |A and B| / |A or B|; both are 1 where A and B are empty.
struct Score {
  double dice = 0;
  double iou = 0;
};

/// The mean over at least one.
Score mean(const std::vector<Score>& scores);

/// Scores over any number of batches. Class 0, all else, has none.
class Metrics {
 public:
  /// Of class 1 and on. 0 while no image was added.
  struct Scores {
    std::vector<Score> pixels;  ///< over the pixels of all images together
    std::vector<Score> images;  ///< the mean over the images
  };

  /// For classes 0 to `classes` - 1, at least 2.
  explicit Metrics(int classes);

  /// [n, ...] each, of equal shape, uint8, on any device: the class of each pixel. Throws std::invalid_argument for
  /// shapes that differ, std::out_of_range for a pixel of no class.
  void add(const at::Tensor& predicted, const at::Tensor& truth);
  Scores scores() const;

 private:
  // Pixels of one class.
  struct Count {
    Score score() const;

    int64_t both = 0;  // in the prediction and in the truth
    int64_t sum = 0;   // in the prediction plus in the truth
  };

  std::vector<Count> total_;      // by class
  std::vector<Score> image_sum_;  // of class 1 and on
  int64_t images_ = 0;
};

}  // namespace gpipe::examples::unet
