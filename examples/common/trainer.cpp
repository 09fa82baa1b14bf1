#include "examples/common/trainer.h"

#include <ATen/autocast_mode.h>
#include <torch/optim/adam.h>
#include <torch/utils.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <numbers>
#include <stdexcept>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "examples/common/files.h"
#include "examples/common/plan.h"
#include "examples/common/random.h"
#include "examples/common/step_record.h"
#include "gpipe/loss.h"
#include "gpipe/options.h"
#include "gpipe/snapshot.h"

namespace gpipe::examples {
namespace {

namespace fs = std::filesystem;

std::atomic<int> received = 0;

void record(int signal) { received = signal; }

void record_or_end(int signal) {
  if (received.exchange(signal) == 0) return;
  std::signal(signal, SIG_DFL);
  std::raise(signal);
}

// A cluster may set WORLD_SIZE for other reasons. Only torchrun sets this variable.
bool is_by_torchrun() { return std::getenv("TORCHELASTIC_RUN_ID") != nullptr; }

// Records signals. The second one ends the program at once, except under torchrun, which adds one to each of a terminal.
void record_signals() {
  for (const int signal : {SIGINT, SIGTERM}) {
    // A job that was started with a signal ignored continues to ignore it.
    if (std::signal(signal, is_by_torchrun() ? record : record_or_end) == SIG_IGN) std::signal(signal, SIG_IGN);
  }
}

class Trainer {
 public:
  Trainer(Planned planned, Task& task, const TrainingOptions& options, Identity identity,
          std::vector<std::string> columns)
      : pipe_(std::move(planned.pipe)),
        prediction_(std::move(planned.prediction)),
        task_(task),
        options_(options),
        identity_(std::move(identity)),
        columns_(std::move(columns)),
        optimizer_(pipe_->parameters(), torch::optim::AdamOptions(options.learning_rate)),
        writes_(is_first(options.ranks)),
        history_(absl::StrJoin(columns_, ",") + "\n") {}

  void resume(const nlohmann::json& saved) {
    load_snapshot(options_.resume, *pipe_, &optimizer_);
    epoch_ = saved.at("epoch");
    batch_ = saved.at("position").at("batch");
    loss_sum_ = saved.at("position").at("loss_sum");
    history_ = saved.at("history");
    best_ = saved.at("best").get<decltype(best_)>();
  }

  // Returns the signal that ended it early, or 0.
  int run() {
    if (writes_) write_history();  // a run that was killed may have written more than its snapshot has
    std::cout << "training: " << options_.epochs - epoch_ << " epochs, mini-batches of " << options_.batch_size
              << " as " << options_.chunks << " micro-batches" << std::endl;
    record_signals();
    while (epoch_ < options_.epochs && !stops()) {
      if (train(epoch_ + 1)) {
        validate(epoch_ + 1);
      } else {
        save(kLatestSnapshot);
      }
    }
    record_.print(prediction_);
    const auto latest = (options_.output / kLatestSnapshot).string();
    if (epoch_ < options_.epochs) {
      std::cout << "stopped; to continue, give the same flags and --resume " << latest << std::endl;
      return signal_;
    }
    if (best_.second == 0) throw std::runtime_error("the " + columns_[2] + " of no epoch is a number");
    std::cout << absl::StrFormat("reached: %s %.4f, the best in epoch %d\nwrote: %s/", columns_[2], best_.first,
                                 best_.second, options_.output.string())
              << kHistoryFile << ", epoch_NNN.png, " << kLatestSnapshot << ", " << kBestSnapshot << std::endl;
    return 0;
  }

 private:
  // Whether a process has got a signal. All processes ask at the same time.
  bool stops() {
    if (signal_ == 0) signal_ = static_cast<int>(pipe_->team().largest(static_cast<std::uint64_t>(received.load())));
    return signal_ != 0;
  }

  // Trains an epoch from batch_ on. Returns false if a signal ended it.
  bool train(int epoch) {
    pipe_->train();
    const double factor = (1 + std::cos(std::numbers::pi * (epoch - 1) / options_.epochs)) / 2;
    for (auto& group : optimizer_.param_groups()) group.options().set_lr(options_.learning_rate * factor);
    const auto images = task_.training_images();
    const auto order = random_order(images, options_.seed, static_cast<std::uint64_t>(epoch));
    const auto batches = order.split(options_.batch_size);
    const auto start = Clock::now();
    for (std::int64_t seen = 0; batch_ < std::ssize(batches);) {
      step(task_.read(batches[batch_], epoch));
      seen += batches[batch_++].numel();
      images_per_second_ = static_cast<double>(seen) / seconds_since(start);
      if (stops()) return false;
      if (options_.snapshot_every > 0 && batch_ % options_.snapshot_every == 0) save(kLatestSnapshot);
    }
    return true;
  }

  void step(const Example& example) {
    const auto images = example.target.size(0);
    optimizer_.zero_grad();
    record_.begin(pipe_);
    const auto loss = pipe_->step(example.input, example.target, loss_).loss;
    record_.end(pipe_, /*whole=*/images == options_.batch_size);
    optimizer_.step();
    const auto value = loss.item<double>();
    record_.show(value, images);
    if (!std::isfinite(value)) throw std::runtime_error("the loss is not finite; try a lower --learning-rate");
    loss_sum_ += value * static_cast<double>(images);
  }

  // Returns the scores and the loss.
  std::vector<double> scores(int epoch) {
    pipe_->trace(nullptr);
    pipe_->eval();
    const torch::NoGradGuard no_grad;
    auto picture = writes_ ? options_.output / absl::StrFormat("epoch_%03d.png", epoch) : fs::path();
    const auto images = task_.validation_images();
    double loss_sum = 0;
    for (const auto& numbers : torch::arange(images).split(options_.batch_size)) {
      const auto example = task_.read(numbers, /*epoch=*/0);
      const auto output = pipe_->forward(example.input).cpu();
      loss_sum += task_.loss(output, example.target).item<double>() * static_cast<double>(numbers.numel());
      task_.add(example, output, std::exchange(picture, {}));
    }
    auto scores = task_.take_scores();
    scores.push_back(loss_sum / static_cast<double>(images));
    return scores;
  }

  // Validates an epoch and completes it.
  void validate(int epoch) {
    auto values = scores(epoch);
    values.insert(values.begin(),
                  {static_cast<double>(epoch), loss_sum_ / static_cast<double>(task_.training_images())});
    values.insert(values.end(), {optimizer_.param_groups().front().options().get_lr(), images_per_second_});
    absl::StrAppend(&history_, absl::StrJoin(values, ","), "\n");
    epoch_ = epoch;
    batch_ = 0;
    loss_sum_ = 0;

    // the latest snapshot is written last: a run that is killed before this repeats the epoch and all its files.
    if (writes_) write_history();
    if (values[2] > best_.first) {
      best_ = {values[2], epoch};
      save(kBestSnapshot);
    }
    save(kLatestSnapshot);

    std::cout << "epoch " << epoch << "/" << options_.epochs << ":";
    for (std::size_t i = 1; i + 2 < columns_.size(); ++i) {
      std::cout << absl::StrFormat("%s %s %.4f", i > 1 ? "," : "", columns_[i], values[i]);
    }
    std::cout << std::endl;
  }

  void write_history() const {
    const auto path = options_.output / kHistoryFile, temporary = options_.output / "history.csv.tmp";
    write_file(temporary, history_);
    fs::rename(temporary, path);  // the path always names a complete file
  }

  void save(const std::string& name) {
    nlohmann::json extra = {{"epoch", epoch_}, {"options", identity_}, {"history", history_}, {"best", best_}};
    extra["position"] = {{"batch", batch_}, {"loss_sum", loss_sum_}};
    save_snapshot(options_.output / name, *pipe_, &optimizer_, {.extra = extra.dump()});
  }

  GPipe pipe_;
  const std::optional<Prediction> prediction_;
  Task& task_;
  const TrainingOptions& options_;
  const Identity identity_;
  const std::vector<std::string> columns_;
  torch::optim::Adam optimizer_;
  const LossFunction loss_ = tensor_loss(
      [this](const torch::Tensor& output, const torch::Tensor& target) { return task_.loss(output, target); });
  const bool writes_;
  StepRecord record_{options_.watch};
  int signal_ = 0;  // that a process has got
  double images_per_second_ = 0;

  // The position of the training, which snapshots store.
  int epoch_ = 0;                          // completed epochs
  std::int64_t batch_ = 0;                 // completed mini-batches of the current epoch
  double loss_sum_ = 0;                    // over their images
  std::string history_;                    // the text of history.csv
  std::pair<double, int> best_ = {-1, 0};  // the highest first score, which is not negative, and its epoch
};

// Joins the processes that torchrun has started together with this one.
std::shared_ptr<Ranks> join_processes() {
  const char* size = std::getenv("WORLD_SIZE");
  if (!is_by_torchrun() || (size != nullptr && size == std::string_view("1"))) return nullptr;
  auto ranks = Ranks::from_environment(RanksOptions().share_outputs(true));
  if (!is_first(ranks) && std::freopen("/dev/null", "w", stdout) == nullptr) {
    throw std::runtime_error("cannot open /dev/null");
  }
  return ranks;
}

}  // namespace

int run_training(TrainingOptions options, const Program& program) {
  options.ranks = join_processes();
  auto identity = program.identity;
  identity.insert({{"--batch-size", absl::StrCat(options.batch_size)},
                   {"--seed", absl::StrCat(options.seed)},
                   {"--epochs", absl::StrCat(options.epochs)},
                   {"--learning-rate", absl::StrCat(options.learning_rate)},
                   {"--amp", absl::StrCat(options.amp)}});
  std::vector<std::string> columns = {"epoch", "train_loss"};
  columns.insert(columns.end(), program.scores.begin(), program.scores.end());
  columns.insert(columns.end(), {"val_loss", "learning_rate", "images_per_second"});
  const auto start = read_resumed(options, identity);
  if (start && start->at("epoch") >= options.epochs) {
    std::cout << "nothing is left to train: " << options.resume.string() << " has " << start->at("epoch")
              << " epochs, and --epochs is " << options.epochs << std::endl;
    return 0;
  }
  torch::manual_seed(options.seed);
  auto model = program.make_model();
  check_pipeline(model, options);

  run_first(options.ranks, [&] {
    prepare_output(options);
    if (program.prepare) program.prepare();
  });
  const auto task = program.load();
  identity["images"] = absl::StrCat(task->training_images());
  if (start) check_identity(identity, *start, options.resume);
  auto planned = plan_training(model, options, task->read(torch::tensor({0}), /*epoch=*/0).input[0].sizes());
  for (const auto& device : planned.pipe->devices()) {
    if (!options.amp) continue;  // on this thread, whose calls of a pipeline hand it on; the loss needs no scaling
    at::autocast::set_autocast_enabled(device.type(), true);
    at::autocast::set_autocast_dtype(device.type(), torch::kBFloat16);
  }
  Trainer trainer(std::move(planned), *task, options, identity, columns);
  if (start) trainer.resume(*start);
  const int signal = trainer.run();
  return signal == 0 ? 0 : 128 + signal;
}

}  // namespace gpipe::examples
