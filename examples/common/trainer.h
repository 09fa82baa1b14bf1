#pragma once

#include <torch/optim/adam.h>

#include <filesystem>
#include <functional>
#include <iosfwd>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "balance/predict.h"
#include "examples/common/history.h"
#include "examples/common/image.h"
#include "examples/common/interrupt.h"
#include "examples/common/start.h"
#include "examples/common/tensorboard.h"
#include "examples/common/training_options.h"
#include "gpipe/gpipe.h"
#include "gpipe/snapshot/snapshot.h"

namespace gpipe::examples {

struct Example {
  torch::Tensor input;
  torch::Tensor target;
};

/// Mini-batches in order, until nothing comes.
using Examples = std::function<std::optional<Example>()>;

/// What is to be learnt: the part of a training program that is its own.
class Task {
 public:
  virtual ~Task() = default;

  virtual std::int64_t training_images() const = 0;
  /// An epoch's mini-batches from number `first` on; the same for the same epoch, whenever asked.
  virtual Examples training(int epoch, std::int64_t first) = 0;
  virtual torch::Tensor loss(const torch::Tensor& output, const torch::Tensor& target) = 0;

  /// What validate() returns; the first tells by its height which epoch is best.
  virtual std::vector<std::string> score_names() const = 0;
  /// In eval mode without gradients. What it draws goes to the writer, and the path of what it writes to `files`.
  virtual std::vector<double> validate(GPipe& pipe, int epoch, EventFile& events,
                                       std::vector<std::filesystem::path>& files) = 0;
};

/// Trains a pipeline on a task and leaves in options.output: history.csv, a TensorBoard event file, latest.snapshot and
/// best.snapshot. After SIGINT or SIGTERM it ends the step, or the validation, writes latest.snapshot and returns. A
/// run that goes on from a snapshot ends with the weights of one that never stopped: bit for bit where the
/// micro-batches are the same.
class Trainer {
 public:
  /// `start`: the snapshot to go on from, whose weights the pipeline has already. `terminal`: draw a progress bar.
  /// `prediction`: of a step, to be compared with what it takes.
  Trainer(GPipe pipe, Task& task, TrainingOptions options, Identity identity, std::optional<Snapshot> start,
          std::optional<Prediction> prediction, std::ostream& out, bool terminal);

  /// Returns the signal that ended it early, or 0. Errors: std::runtime_error for a snapshot that does not fit, a loss
  /// that is not finite, a file that cannot be written.
  int run();

  /// The files written so far, in order.
  const std::vector<std::filesystem::path>& files() const { return files_; }

 private:
  void resume(const Snapshot& snapshot);
  /// One epoch from batch_ on; false when a signal ended it.
  bool train(int epoch, const Interrupt& interrupt);
  void step(const Example& example);
  void try_smallest();
  /// What a step took beside what was predicted of it.
  void compare() const;
  void clip_gradients();
  void finish(int epoch);
  void set_learning_rate(int epoch);
  void save(const std::string& name);
  /// Of the history: an epoch's values, by column.
  std::vector<double> row(int epoch) const;
  std::filesystem::path path(const std::string& name) const { return options_.output / name; }

  GPipe pipe_;
  Task& task_;
  const TrainingOptions options_;
  const Identity identity_;
  std::optional<Snapshot> start_;
  const std::optional<Prediction> prediction_;
  std::ostream& out_;
  const bool terminal_;
  torch::optim::Adam optimizer_;
  const std::vector<std::string> columns_;
  std::vector<std::filesystem::path> files_;
  std::unique_ptr<EventFile> events_;
  std::unique_ptr<History> history_file_;

  // Where the training is; all of it goes into a snapshot.
  int epoch_ = 0;           // completed
  std::int64_t batch_ = 0;  // done of the next one
  std::int64_t seen_ = 0;   // images of the next one
  double loss_sum_ = 0;     // over those images
  std::map<std::string, std::vector<double>> history_;

  std::int64_t steps_ = 0;                // of this process
  bool traced_ = false;                   // one of them
  std::vector<double> step_seconds_;      // forward to backward, of whole mini-batches
  std::vector<std::int64_t> step_bytes_;  // by stage, the most of such a step
  double images_per_second_ = 0;
};

/// Writes an epoch's picture as a PNG, gives it to the events under a tag, and its path to `files`.
void show_picture(const Image& picture, const std::filesystem::path& path, const std::string& tag, int epoch,
                  EventFile& events, std::vector<std::filesystem::path>& files);

/// Runs it, names what it wrote, after the directory of drawn data if any, and returns the program's exit code.
int run_and_report(Trainer& trainer, const std::filesystem::path& drawn, std::ostream& out);

}  // namespace gpipe::examples
