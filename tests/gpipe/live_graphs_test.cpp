// How many cells' graphs are alive: never more than the verifier says, and none after a step.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "gpipe/schedule/verifier.h"
#include "tests/gpipe/helpers.h"
#include "tests/gpipe/instruments.h"

namespace gpipe {
namespace {

TEST(LiveGraphs, PeakAtTheVerifiersBound) {
  for (const auto checkpoint : kModes) {
    Peak first;
    Peak second;
    GPipe pipe(Sequential(first, second), {1, 1}, GPipeOptions().chunks(4).checkpoint(checkpoint));
    const auto program = pipe->program(4);
    const auto peaks = verify(program->layout(), program->edges(), program->schedule());
    pipe->forward(torch::randn({8, 6}).requires_grad_()).sum().backward();
    EXPECT_EQ(first->live->peak, peaks.graphs[0]);
    EXPECT_EQ(second->live->peak, peaks.graphs[1]);
    EXPECT_EQ(first->live->now, 0);
    EXPECT_EQ(second->live->now, 0);
  }
}

TEST(LiveGraphs, AreFreedByABackwardOrWithTheOutput) {
  for (const auto checkpoint : kModes) {
    SCOPED_TRACE(to_string(checkpoint));
    Peak first;
    Peak second;
    const auto live = [&] { return first->live->now + second->live->now; };
    GPipe pipe(Sequential(Linear(6, 6), first, Linear(6, 6), second), {2, 2},
               GPipeOptions().chunks(3).checkpoint(checkpoint));
    { const auto y = pipe->forward(torch::randn({6, 6})); }
    EXPECT_EQ(live(), 0) << "the output was dropped";
    const auto loss = pipe->forward(torch::randn({6, 6})).sum();
    EXPECT_EQ(live(), checkpoint == Checkpoint::kNever ? 6 : checkpoint == Checkpoint::kExceptLast ? 2 : 0);
    loss.backward();
    EXPECT_EQ(live(), 0) << "the backward has run";
    torch::NoGradGuard no_grad;
    const auto y = pipe->forward(torch::randn({6, 6}));
    EXPECT_EQ(live(), 0) << "there are no gradients";
  }
}

}  // namespace
}  // namespace gpipe
