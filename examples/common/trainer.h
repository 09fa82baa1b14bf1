#pragma once

#include <torch/nn/modules/container/sequential.h>
#include <torch/types.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "examples/common/options.h"
#include "examples/common/resume.h"
#include "gpipe/gpipe.h"

namespace gpipe::examples {

/// Images, and what is to be learned of each.
struct Example {
  torch::Tensor input;
  torch::Tensor target;
};

/// The data, loss and scores of a training program. The rest is the same in all training programs.
class Task {
 public:
  virtual ~Task() = default;

  virtual std::int64_t training_images() const = 0;
  virtual std::int64_t validation_images() const = 0;
  /// Reads the images of these numbers. `epoch` is 0 to validate. What is read depends on the arguments alone.
  virtual Example read(const torch::Tensor& numbers, int epoch) const = 0;
  /// Returns the loss of a mini-batch, or of one micro-batch: a mean over samples, so that the loss of the mini-batch
  /// is the mean of its micro-batches' losses, weighted by samples. Called on the last stage's worker thread.
  virtual torch::Tensor loss(const torch::Tensor& output, const torch::Tensor& target) const = 0;

  /// Adds a mini-batch to the scores of a validation. Draws a picture of it, unless the path is empty.
  virtual void add(const Example& example, const torch::Tensor& output, const std::filesystem::path& picture) = 0;
  /// Returns the scores, which begin anew.
  virtual std::vector<double> take_scores() = 0;
};

/// What a training program adds to the flags of all.
struct Program {
  Identity identity;                ///< the program's own flags that decide its result
  std::vector<std::string> scores;  ///< that the task computes; the epoch with the highest first score is the best
  std::function<torch::nn::Sequential()> make_model;
  std::function<std::unique_ptr<Task>()> load;  ///< reads the data, and prints what it is
  std::function<void()> prepare = nullptr;      ///< writes or checks the data before, in the first process alone
};

/// Trains a program's model on its task as a pipeline, by GPipe::step(). Returns the program's exit code.
///
/// Writes into options.output: history.csv, epoch_NNN.png, and the snapshots latest and best. After SIGINT
/// or SIGTERM it finishes the mini-batch or the validation, writes the latest snapshot and returns; without torchrun,
/// a second one ends the program at once. A resumed run ends with the weights of an uninterrupted one, bit for bit if the
/// micro-batches and the order in which the schedule sums their gradients are the same. In several processes, all train,
/// and the first writes.
///
/// Errors: std::runtime_error for files that cannot be read or written, and for a loss that is not finite;
/// std::invalid_argument for options that do not fit the model.
int run_training(TrainingOptions options, const Program& program);

}  // namespace gpipe::examples
