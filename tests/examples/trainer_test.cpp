#include "examples/common/trainer.h"

#include <ATen/CPUGeneratorImpl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>
#include <torch/utils.h>

#include <algorithm>
#include <csignal>
#include <functional>
#include <map>
#include <numeric>
#include <sstream>
#include <stdexcept>
#include <utility>

#include "examples/common/outputs.h"
#include "tests/examples/fixtures.h"

namespace gpipe::examples {
namespace {

constexpr std::int64_t kImages = 14;
constexpr std::int64_t kBatchSize = 4;
constexpr std::int64_t kSteps = 4;  // per epoch
constexpr int kEpochs = 3;

/// Learns random numbers. Calls `disturb` before each mini-batch, of training or of validation.
class RandomNumbers : public Task {
 public:
  using Disturb = std::function<void(bool training, int epoch, std::int64_t batch)>;

  explicit RandomNumbers(Disturb disturb) : disturb_(std::move(disturb)) {}

  std::int64_t training_images() const override { return kImages; }

  Examples training(int epoch, std::int64_t first) override {
    epoch_ = epoch;
    return [this, epoch, next = first]() mutable -> std::optional<Example> {
      if (next == kSteps) return std::nullopt;
      disturb_(true, epoch, next);
      const auto rest = kImages - kBatchSize * next;
      return batch(kSteps * epoch + next++, std::min(kBatchSize, rest));
    };
  }

  torch::Tensor loss(const torch::Tensor& output, const torch::Tensor& target) const override {
    return torch::nn::functional::mse_loss(output, target);
  }

  std::vector<ScoreName> scores() const override { return {{"score", "score/val"}}; }

  std::vector<double> validate(GPipe& pipe, const ShowPicture& show, const Stops& stops) override {
    double sum = 0;
    for (std::int64_t number = 0; number < 2; ++number) {
      disturb_(false, epoch_, number);
      if (stops()) return {};
      const auto example = batch(1000 + number, kBatchSize);
      sum -= loss(pipe->forward(example.input), example.target).item<double>();
      if (number == 0) show(Image({4, 4}, 3), "epoch", "picture");
    }
    return {sum};
  }

 private:
  static Example batch(std::int64_t number, std::int64_t size) {
    auto generator = at::detail::createCPUGenerator(static_cast<std::uint64_t>(number));
    return {torch::randn({size, 3}, generator), torch::randn({size, 1}, generator)};
  }

  const Disturb disturb_;
  int epoch_ = 0;
};

class TrainerTest : public ::testing::Test {
 protected:
  /// Trains in a folder, from its latest snapshot if it has one. Returns the signal that ended the training.
  int train(
      const std::string& folder, const RandomNumbers::Disturb& disturb = [](bool, int, std::int64_t) {}) {
    TrainingOptions options;
    options.output = directory_ / folder;
    options.epochs = kEpochs;
    options.batch_size = kBatchSize;
    options.resume = kAuto;
    options.snapshot_every = 2;
    make_directory(options.output);
    RandomNumbers task(disturb);
    std::ostringstream out;
    auto start = read_start(options, {}, history_columns(task.scores()), out);
    torch::manual_seed(1);
    torch::nn::Sequential model{torch::nn::Linear(3, 4), torch::nn::Dropout(), torch::nn::Linear(4, 1)};
    if (start) restore_start(options, *start, *model);
    GPipe pipe(model, {2, 1}, GPipeOptions().chunks(2).devices({torch::kCPU, torch::kCPU}));
    return Trainer(pipe, task, options, {}, start, std::nullopt, out, /*terminal=*/false).run();
  }

  Snapshot latest(const std::string& folder) { return read_snapshot(directory_ / folder / kLatestSnapshot); }

  /// All values that the event files of a folder have, by tag: their steps.
  std::map<std::string, std::vector<std::int64_t>> events(const std::string& folder) {
    std::map<std::string, std::vector<std::int64_t>> steps;
    cut_event_files(directory_ / folder, [&](std::string_view tag, std::int64_t step) {
      steps[std::string(tag)].push_back(step);
      return true;
    });
    for (auto& [tag, of_tag] : steps) std::sort(of_tag.begin(), of_tag.end());
    return steps;
  }

  void expect_equal(const std::string& one, const std::string& other) {
    auto a = latest(one), b = latest(other);
    for (auto* each : {&a, &b}) each->history.erase("images_per_second");
    EXPECT_EQ(a.history, b.history);
    EXPECT_EQ(a.epoch, b.epoch);
    EXPECT_EQ(a.position, b.position);
    EXPECT_TRUE(torch::equal(a.random, b.random));
    ASSERT_EQ(a.model.keys(), b.model.keys());
    for (const auto& item : a.model) EXPECT_TRUE(torch::equal(item.value(), b.model[item.key()])) << item.key();
    EXPECT_EQ(count_lines(directory_ / one / kHistoryFile), kEpochs);
    EXPECT_EQ(count_lines(directory_ / other / kHistoryFile), kEpochs);
    EXPECT_EQ(events(one), events(other));
  }

  const TemporaryDirectory directory_;
};

TEST_F(TrainerTest, EachStepAndEachEpochIsLoggedOnce) {
  ASSERT_EQ(train("whole"), 0);
  std::vector<std::int64_t> steps(kEpochs * kSteps);
  std::iota(steps.begin(), steps.end(), 1);
  const auto logged = events("whole");
  EXPECT_EQ(logged.at("loss/train_step"), steps);
  EXPECT_EQ(logged.at("score/val"), (std::vector<std::int64_t>{1, 2, 3}));
  EXPECT_EQ(logged.at("picture"), (std::vector<std::int64_t>{1, 2, 3}));
}

TEST_F(TrainerTest, ASignalStopsAnyMiniBatchAndTheResumedRunEndsAlike) {
  ASSERT_EQ(train("whole"), 0);
  for (const bool training : {true, false}) {
    for (const std::int64_t number : {0, 1}) {
      const auto folder = std::to_string(training) + std::to_string(number);
      const auto stop = [&](bool is_training, int epoch, std::int64_t batch) {
        if (epoch == 2 && is_training == training && batch == number) std::raise(SIGTERM);
      };
      EXPECT_EQ(train(folder, stop), SIGTERM);
      EXPECT_EQ(latest(folder).epoch, 1);
      EXPECT_EQ(latest(folder).position.at("batch"), training ? number + 1 : kSteps);
      EXPECT_EQ(train(folder), 0);
      expect_equal(folder, "whole");
    }
  }
}

// An exception leaves the files as a kill does.
TEST_F(TrainerTest, AfterAKillTheTrainingGoesOnFromTheLatestSnapshot) {
  ASSERT_EQ(train("whole"), 0);
  for (const bool training : {true, false}) {
    for (std::int64_t number = 0; number < (training ? kSteps : 2); ++number) {
      for (const int killed : {1, 2}) {
        const auto folder = std::to_string(training) + std::to_string(number) + std::to_string(killed);
        const auto kill = [&](bool is_training, int epoch, std::int64_t batch) {
          if (epoch == killed && is_training == training && batch == number) throw std::runtime_error("killed");
        };
        EXPECT_THROW(train(folder, kill), std::runtime_error);
        if (killed == 2) {
          EXPECT_EQ(latest(folder).position.at("batch"), training ? number / 2 * 2 : kSteps);
        }
        EXPECT_EQ(train(folder), 0);
        expect_equal(folder, "whole");
      }
    }
  }
}

}  // namespace
}  // namespace gpipe::examples
