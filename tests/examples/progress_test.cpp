#include "examples/common/progress.h"

#include <gtest/gtest.h>

#include <sstream>

namespace gpipe::examples {
namespace {

class ProgressTest : public ::testing::Test {
 protected:
  Progress::Clock clock() {
    return [this] { return now_; };
  }

  std::ostringstream out_;
  double now_ = 100;
};

TEST_F(ProgressTest, BarIsRedrawnInPlace) {
  {
    Progress progress(out_, true, "Epoch 1/5", 48, clock());
    now_ += 2;
    progress.add(12, 0.75);
    EXPECT_EQ(out_.str(), "\rEpoch 1/5  [######..................]  12/48  loss 0.7500  6.0 images/s  ETA 0:06");
    out_.str("");
    now_ += 0.05;
    progress.add(12, 0.5);
    EXPECT_EQ(out_.str(), "") << "too soon to draw";
    now_ += 5.95;
    progress.add(24, 0.25);
  }
  EXPECT_EQ(out_.str(), "\rEpoch 1/5  [########################]  48/48  loss 0.2500  6.0 images/s  in 0:08 \n");
}

TEST_F(ProgressTest, UnfinishedBarEndsItsLine) {
  {
    Progress progress(out_, true, "Epoch 1/5", 48, clock());
    now_ += 1;
    progress.add(12, 0.5);
  }
  EXPECT_EQ(out_.str().back(), '\n');
}

TEST_F(ProgressTest, PlainLinesAppearEveryTenSeconds) {
  {
    Progress progress(out_, false, "Epoch 2/5", 100, clock());
    for (int i = 0; i < 10; ++i) {
      now_ += 3;
      progress.add(10, 1.0 / (i + 1));
    }
  }
  EXPECT_EQ(out_.str(),
            "Epoch 2/5  40/100  loss 0.2500  3.3 images/s  ETA 0:18\n"
            "Epoch 2/5  80/100  loss 0.1250  3.3 images/s  ETA 0:06\n"
            "Epoch 2/5  100/100  loss 0.1000  3.3 images/s  in 0:30\n");
}

TEST_F(ProgressTest, SpeedIsZeroBeforeTimePasses) {
  Progress progress(out_, false, "Epoch 1/1", 4, clock());
  progress.add(4, 2);
  EXPECT_EQ(progress.images_per_second(), 0);
  EXPECT_EQ(out_.str(), "Epoch 1/1  4/4  loss 2.0000  0.0 images/s  in 0:00\n");
}

TEST_F(ProgressTest, DefaultClockRuns) {
  Progress progress(out_, false, "Epoch 1/1", 4);
  progress.add(4, 2);
  EXPECT_GE(progress.seconds(), 0);
}

}  // namespace
}  // namespace gpipe::examples
