#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace gpipe::examples::unet {

/// How well a predicted mask matches the true one. With A the predicted pixels of a class and B the true ones:
/// Dice = 2 |A and B| / (|A| + |B|), IoU = |A and B| / |A or B|. Both are 1 if A and B are empty.
struct Score {
  double dice = 0;
  double iou = 0;
};

/// The mean of the scores. REQUIRES: there is at least one.
Score mean(const std::vector<Score>& scores);

/// Scores over any number of batches. Class 0, the background, has no score.
class Metrics {
 public:
  /// The scores of classes 1 and up. 0 before any image was added.
  struct Scores {
    std::vector<Score> pixels;  ///< over the pixels of all images together
    std::vector<Score> images;  ///< the mean over the images
  };

  /// For classes 0 to `classes` - 1, at least 2.
  explicit Metrics(int classes);
  /// Continues from sums(). REQUIRES: those are of as many classes.
  Metrics(int classes, const std::vector<double>& sums);

  /// Both tensors are [n, ...], uint8, on any device: the class of each pixel. Errors: std::invalid_argument for shapes
  /// that differ; std::out_of_range for a pixel that is not of these classes.
  void add(const at::Tensor& predicted, const at::Tensor& truth);
  Scores scores() const;
  /// All that the scores follow from, as numbers. Those of several parts of the images add up to those of all.
  std::vector<double> sums() const;

 private:
  // Counts of pixels of one class.
  struct Count {
    Score score() const;

    int64_t both = 0;  // in the prediction and in the truth
    int64_t sum = 0;   // in the prediction plus in the truth
  };

  std::vector<Count> total_;      // per class
  std::vector<Score> image_sum_;  // of classes 1 and up
  int64_t images_ = 0;
};

}  // namespace gpipe::examples::unet
