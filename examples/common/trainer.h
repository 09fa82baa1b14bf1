#pragma once

#include <torch/optim/adam.h>

#include <filesystem>
#include <iosfwd>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "balance/predict.h"
#include "examples/common/history.h"
#include "examples/common/interrupt.h"
#include "examples/common/start.h"
#include "examples/common/step_record.h"
#include "examples/common/task.h"
#include "examples/common/tensorboard.h"
#include "examples/common/training_options.h"
#include "gpipe/gpipe.h"
#include "gpipe/loss.h"
#include "gpipe/snapshot.h"

namespace gpipe::examples {

/// Trains a pipeline on a task by GPipe::step(). Writes into options.output: history.csv, a TensorBoard event file,
/// latest.snapshot and best.snapshot. After SIGINT or SIGTERM it finishes the mini-batch, of training or validation, writes
/// latest.snapshot and returns. A resumed run ends with the weights of an uninterrupted one, bit for bit if the micro-batches
/// and the order in which the schedule sums their gradients are the same. In several processes, all train, and the first
/// writes.
class Trainer {
 public:
  /// `start` is the snapshot to resume; the pipeline has its weights already. `prediction` of a step is compared with
  /// the measured steps. `terminal` selects a progress bar.
  Trainer(GPipe pipe, Task& task, TrainingOptions options, Identity identity, std::optional<Snapshot> start,
          std::optional<Prediction> prediction, std::ostream& out, bool terminal);

  /// Returns the signal that ended it early, or 0. Errors: std::runtime_error for micro-batches of a single image that
  /// the model cannot take, a loss that is not finite, or a file that cannot be written.
  int run();

  /// The files written so far, in order.
  const std::vector<std::filesystem::path>& files() const { return files_; }

 private:
  void resume(const Snapshot& snapshot);
  void open_files();
  /// Whether a process has got a signal. All processes ask at the same time.
  bool stops(const Interrupt& interrupt);
  /// Trains an epoch from batch_ on. Returns false if a signal ended it.
  bool train(int epoch, const Interrupt& interrupt);
  /// Trains on a mini-batch of `images`, of which `example` is this replica's part.
  void step(const Example& example, std::int64_t images);
  void check_smallest_micro_batch();
  /// Validates an epoch and completes it. Returns false if a signal stopped the validation.
  bool finish(int epoch, const Interrupt& interrupt);
  /// The steps of all epochs so far.
  std::int64_t steps() const;
  void add_scalar(const std::string& tag, std::int64_t step, double value);
  void show(const Image& picture, const std::string& name, const std::string& tag, int epoch);
  void set_learning_rate(int epoch);
  void save(const std::string& name);
  /// An epoch's values in the history, by column.
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
  const LossFunction loss_;
  torch::optim::Adam optimizer_;
  const std::vector<ScoreName> scores_;
  const std::vector<std::string> columns_;
  const bool writes_;
  std::vector<std::filesystem::path> files_;
  std::unique_ptr<EventFile> events_;  // this and the next: null if another process writes
  std::unique_ptr<History> history_file_;
  int signal_ = 0;  // that a process has got

  // The position of the training, which snapshots store.
  int epoch_ = 0;           // completed epochs
  std::int64_t batch_ = 0;  // completed mini-batches of the current epoch
  std::int64_t seen_ = 0;   // images in them
  double loss_sum_ = 0;     // over those images
  std::map<std::string, std::vector<double>> history_;

  StepRecord record_;
  double images_per_second_ = 0;
};

/// Runs the trainer and lists the files that it wrote, after the folder of drawn data if there is one. Returns the
/// program's exit code.
int run_and_report(Trainer& trainer, const std::filesystem::path& drawn, std::ostream& out);

}  // namespace gpipe::examples
