#pragma once

#include <memory>
#include <vector>

#include "examples/common/task.h"
#include "examples/resnet18_mnist/idx.h"
#include "gpipe/ranks.h"

namespace gpipe::examples::mnist {

/// The scores of a validation: accuracy and loss on the test images.
std::vector<ScoreName> classification_scores();

/// Learns to classify images [n, 1, h, w] with values 0 to 1 into logits [n, classes].
class ClassificationTask : public Task {
 public:
  /// Its picture is the confusion matrix of an epoch. With `ranks`, runs this replica's part of each mini-batch.
  ClassificationTask(const LabelledImages& training, const LabelledImages& test, std::int64_t classes,
                     std::int64_t batch_size, std::uint64_t seed, std::shared_ptr<Ranks> ranks = nullptr);

  std::int64_t training_images() const override { return training_.input.size(0); }
  Examples training(int epoch, std::int64_t first) override;
  torch::Tensor loss(const torch::Tensor& logits, const torch::Tensor& labels) const override;
  std::vector<ScoreName> scores() const override { return classification_scores(); }
  std::vector<double> validate(GPipe& pipe, const ShowPicture& show, const Stops& stops) override;

 private:
  const Example training_;
  const Example test_;
  const std::int64_t classes_;
  const std::int64_t batch_size_;
  const std::uint64_t seed_;
  const std::shared_ptr<Ranks> ranks_;
};

}  // namespace gpipe::examples::mnist
