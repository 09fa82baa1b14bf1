#include "examples/common/start.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>

#include <sstream>

#include "examples/common/outputs.h"
#include "tests/examples/fixtures.h"

namespace gpipe::examples {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

const std::vector<std::string> kResumedColumns = {"epoch", "train_loss"};

/// An output folder, and the options of a run with --resume auto.
class ResumeAutoTest : public ::testing::Test {
 protected:
  ResumeAutoTest() {
    options_.output = directory_.path();
    options_.epochs = 3;
    options_.resume = kAuto;
  }

  std::filesystem::path latest() const { return directory_ / kLatestSnapshot; }

  void write(const char* name, std::int64_t epochs) {
    Snapshot snapshot;
    snapshot.model = capture_model(*model_);
    snapshot.optimizer = capture_optimizer(torch::optim::Adam(model_->parameters()), *model_);
    snapshot.random = capture_random();
    snapshot.options = make_identity({}, options_);
    snapshot.epoch = epochs;
    snapshot.position = {{"batch", 0}, {"images", 0}};
    for (const auto& column : kResumedColumns) snapshot.history[column].resize(static_cast<std::size_t>(epochs));
    snapshot.history["loss_sum"] = {0};
    write_snapshot(directory_ / name, snapshot);
  }

  std::optional<Snapshot> read() { return read_start(options_, make_identity({}, options_), kResumedColumns, out_); }

  const TemporaryDirectory directory_;
  torch::nn::Sequential model_{torch::nn::Linear(2, 2)};
  TrainingOptions options_;
  std::ostringstream out_;
};

TEST_F(ResumeAutoTest, WithoutASnapshotANewTrainingBegins) {
  write_text(directory_ / kHistoryFile, "epoch,train_loss\n1,0.5\n");  // killed before the first snapshot
  const auto start = read();
  EXPECT_FALSE(start);
  EXPECT_EQ(options_.resume, "");
  EXPECT_FALSE(is_finished(options_, start, out_));
  EXPECT_THAT(out_.str(), HasSubstr(directory_.path().string() + " has no snapshot, so a new training begins"));
  EXPECT_NO_THROW(check_outputs(options_));
}

TEST_F(ResumeAutoTest, AHistoryOfSeveralEpochsIsNotReplaced) {
  write_text(directory_ / kHistoryFile, "epoch,train_loss\n1,0.5\n2,0.4\n");
  EXPECT_FALSE(read());
  EXPECT_THAT(error_of([&] { check_outputs(options_); }), HasSubstr("holds an earlier training (history.csv)"));
}

TEST_F(ResumeAutoTest, ASnapshotToLoadIsNotFinished) {
  write("other", 3);
  options_.load = directory_ / "other";
  const auto start = read();
  ASSERT_TRUE(start);
  EXPECT_EQ(options_.resume, "");
  EXPECT_FALSE(is_finished(options_, start, out_));
}

TEST_F(ResumeAutoTest, TheLatestSnapshotIsTaken) {
  write(kLatestSnapshot, 2);
  write(kBestSnapshot, 1);
  const auto start = read();
  ASSERT_TRUE(start);
  EXPECT_EQ(start->epoch, 2);
  EXPECT_EQ(options_.resume, latest());
  EXPECT_FALSE(is_finished(options_, start, out_));
  EXPECT_EQ(out_.str(), "resume: " + latest().string() + "\n");
  EXPECT_NO_THROW(check_outputs(options_));
}

TEST_F(ResumeAutoTest, TheBestSnapshotIsTakenIfThereIsNoOther) {
  write(kBestSnapshot, 1);
  const auto start = read();
  ASSERT_TRUE(start);
  EXPECT_EQ(options_.resume, directory_ / kBestSnapshot);
}

TEST_F(ResumeAutoTest, ADamagedSnapshotIsNotSkipped) {
  write(kLatestSnapshot, 2);
  write(kBestSnapshot, 1);
  cut(latest(), std::filesystem::file_size(latest()) / 2);
  EXPECT_THAT(error_of([&] { read(); }),
              AllOf(HasSubstr(latest().string()), HasSubstr("truncated"), HasSubstr("move it away")));
}

TEST_F(ResumeAutoTest, AFinishedTrainingIsNoError) {
  write(kLatestSnapshot, 3);
  EXPECT_TRUE(is_finished(options_, read(), out_));
  EXPECT_THAT(out_.str(), HasSubstr("nothing is left to train: " + latest().string() + " has 3 epochs"));
  options_.resume = latest();
  options_.auto_resume = false;
  EXPECT_THAT(error_of([&] { read(); }), HasSubstr("give more --epochs"));
  options_.resume = kAuto;
  options_.epochs = 4;
  EXPECT_FALSE(is_finished(options_, read(), out_));
}

TEST_F(ResumeAutoTest, ASnapshotOfAnotherTrainingIsRefused) {
  write(kLatestSnapshot, 2);
  options_.batch_size = 7;
  EXPECT_THAT(error_of([&] { read(); }), AllOf(HasSubstr(latest().string()), HasSubstr("--batch-size 1, not 7")));
  options_.batch_size = 1;
  options_.resume = kAuto;
  const auto start = read();
  torch::nn::Sequential other{torch::nn::Linear(2, 3)};
  EXPECT_THAT(error_of<std::invalid_argument>([&] { restore_start(options_, *start, *other); }), HasSubstr("0.weight"));
}

}  // namespace
}  // namespace gpipe::examples
