#pragma once

#include <torch/types.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "examples/common/image.h"
#include "gpipe/gpipe.h"

namespace gpipe::examples {

struct Example {
  torch::Tensor input;
  torch::Tensor target;
};

/// Takes a picture of an epoch, with the beginning of its file's name and its tag in TensorBoard.
using ShowPicture = std::function<void(const Image& picture, const std::string& name, const std::string& tag)>;

/// Returns the mini-batches in order, then std::nullopt.
using Examples = std::function<std::optional<Example>()>;

/// Asked before each mini-batch of a validation: whether the program should stop.
using Stops = std::function<bool()>;

/// A validation score: its column in history.csv and its tag in TensorBoard.
struct ScoreName {
  std::string column;
  std::string tag;
};

/// The data, loss and validation of a training program. The rest is the same in all training programs.
class Task {
 public:
  virtual ~Task() = default;

  virtual std::int64_t training_images() const = 0;
  /// An epoch's mini-batches from number `first` on, or this replica's parts of them. They depend on the epoch alone.
  virtual Examples training(int epoch, std::int64_t first) = 0;
  /// Returns the loss of a mini-batch, or of one micro-batch: a mean over samples, so that the loss of the mini-batch is
  /// the mean of its micro-batches' losses, weighted by samples. Called on the last stage's worker thread.
  virtual torch::Tensor loss(const torch::Tensor& output, const torch::Tensor& target) const = 0;

  /// The scores that validate() returns. The epoch with the highest first score is the best.
  virtual std::vector<ScoreName> scores() const = 0;
  /// Called in evaluation mode, without gradients. Each replica reads and runs its part of each mini-batch. All processes get
  /// the same scores. Hands its pictures to `show`, at least in the first process. Returns no scores if it was stopped.
  virtual std::vector<double> validate(GPipe& pipe, const ShowPicture& show, const Stops& stops) = 0;
};

/// The columns of history.csv for a task with these scores.
std::vector<std::string> history_columns(const std::vector<ScoreName>& scores);

}  // namespace gpipe::examples
