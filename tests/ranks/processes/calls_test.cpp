// Calls over ranks that train nothing: values that ranks share, and gradients that are clipped and unscaled together.

#include <torch/nn/utils/clip_grad.h>

#include <limits>
#include <thread>

#include "gpipe/gradients.h"
#include "gpipe/timeline.h"
#include "tests/gpipe/layers.h"
#include "tests/ranks/processes/job.h"

namespace gpipe {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

GPipe make_pipe(int stages, const std::string& schedule, std::shared_ptr<Ranks> ranks) {
  Sequential model;
  for (int s = 0; s < stages; ++s) model->push_back(Linear(4, 4));
  return GPipe(model, Balance(stages, 1), GPipeOptions().chunks(4).schedule(schedule).ranks(std::move(ranks)));
}

RANKS_TEST(RanksCalls, ShareBytesAndTexts, 3) {
  for (const std::string text : {"balance 1,2", "", "a\nb"}) {
    EXPECT_EQ(ranks->share(ranks->rank() == 0 ? text : "nothing"), text);
  }
  auto pipe = make_pipe(3, "gpipe", ranks);
  const int rank = ranks->rank();
  for (const std::size_t size : {5, 1, 0, 1000000, 1000000, 3, 0}) {
    const auto bytes_of = [&](std::size_t r) { return std::string(size * r, static_cast<char>('a' + r)); };
    const auto all = pipe->team().gather(bytes_of(rank));
    if (rank != 0) EXPECT_THAT(all, IsEmpty());
    if (rank == 0) EXPECT_THAT(all, ElementsAre(bytes_of(0), bytes_of(1), bytes_of(2)));
  }
  EXPECT_THAT(message_from([&] { pipe->team().gather("", rank == 2 ? "apples" : "pears"); }),
              HasSubstr("rank 2 calls gather of apples, but rank 0 calls gather of pears"));
  if (rank == 1) pipe->team().withdraw("no bytes today");
  if (rank != 1) {
    EXPECT_THAT(message_from([&] { pipe->team().gather(""); }), HasSubstr("rank 1 refused the call: no bytes today"));
  }
}

std::size_t open_files() {
  const std::filesystem::directory_iterator files("/proc/self/fd");
  return static_cast<std::size_t>(std::distance(begin(files), end(files)));
}

RANKS_TEST(RanksCalls, LeaveNothingBehind, 4, {.ranks = patient().replicas(2)}) {
  auto kept = make_pipe(2, "gpipe", ranks);
  const auto use = [&](int pipelines) {
    for (int i = 0; i < pipelines; ++i) {
      auto pipe = make_pipe(2, "gpipe", ranks);
      const auto x = torch::ones({1 + i * 7 % 50, 4});
      for (auto& each : {pipe, kept}) GPipe(each)->step(x, x, kMse, StepOptions().scale(1 + i / 1e4));
    }
  };
  use(3);
  const auto threads = thread_count() + 5, files = open_files() + 5;
  use(10);  // each would leave a thread and a file
  // A pipeline leaves its group to a thread, which ends soon: if it never does, the job runs out of time.
  while (thread_count() >= threads || open_files() >= files) std::this_thread::sleep_for(milliseconds(10));
}

RANKS_TEST(RanksCalls, ShareNumbers, 2) {
  const auto rank = static_cast<std::uint64_t>(ranks->rank());
  auto pipe = make_pipe(4, "zb_v", ranks);  // rank 0 has the first and the last stage
  EXPECT_EQ(pipe->team().largest(3 * rank), 3);
  EXPECT_EQ(pipe->team().largest(3 - rank), 3);
  EXPECT_EQ(pipe->team().largest(rank == 0 ? 0 : ~std::uint64_t{0}), ~std::uint64_t{0});

  std::vector<double> own;
  for (const auto& parameter : pipe->named_parameters()) own.push_back(std::stoi(parameter.key()));  // its stage
  EXPECT_THAT(pipe->team().of_all_parameters(own), ElementsAre(0, 0, 1, 1, 2, 2, 3, 3));
  if (rank == 1) own.pop_back();
  EXPECT_THAT(message_from([&] { pipe->team().of_all_parameters(own); }),
              HasSubstr(rank == 1 ? "4, but there are 3" : "rank 1 refused the call"));
}

RANKS_TEST(RanksCalls, SumOverReplicas, 6, {.ranks = patient().replicas(3)}) {
  auto pipe = make_pipe(2, "gpipe", ranks);
  // In another order, or with the numbers of more ranks, the first sum would not be 0.
  const double large = std::vector<double>{1e16, 1, -1e16}[ranks->replica()];
  const double counts = ranks->rank() < 3 ? 1 : 100;
  EXPECT_THAT(pipe->team().sum_over_replicas({counts * large, counts}), ElementsAre(0, 3));
  EXPECT_THAT(pipe->team().sum_over_replicas({}), IsEmpty());
  EXPECT_THAT(message_from([&] { pipe->team().sum_over_replicas(std::vector<double>(ranks->rank() == 5 ? 2 : 1)); }),
              HasSubstr("rank 5 calls sum of 2 numbers over replicas, but rank 0 calls sum of 1"));
  EXPECT_EQ(ranks->part(7, 0), std::pair(0L, 3L));
  EXPECT_EQ(ranks->part(7, 2), std::pair(5L, 7L));
}

// Clipping and unscaling over ranks have the bits of one process, which are PyTorch's up to rounding.

GPipe with_gradients(const std::shared_ptr<Ranks>& ranks) {
  torch::manual_seed(4);
  GPipe pipe(Sequential(Linear(6, 6), Stash("a"), torch::nn::Tanh(), Linear(6, 6), Pop("a"), Linear(6, 6)), {2, 2, 2},
             GPipeOptions().chunks(2).ranks(ranks));
  const auto x = torch::arange(48, torch::kFloat).view({8, 6}).sin();
  pipe->step(x, x.cos(), kMse);
  return pipe;
}

RANKS_TEST(WholeGradients, AreClippedAsInOneProcess, 3) {
  for (const double type : {2.0, 1.0, 3.0, kInfinity}) {
    for (const double most : {0.01, 100.0}) {
      auto over = with_gradients(ranks);
      auto alone = with_gradients(nullptr);
      auto plain = with_gradients(nullptr);
      const auto total = clip_grad_norm_(*over, most, type);
      EXPECT_TRUE(same(total, clip_grad_norm_(*alone, most, type)));
      expect_part_of(gradients_of(over), gradients_of(alone));
      const auto norm = total.item<double>();
      EXPECT_NEAR(norm, torch::nn::utils::clip_grad_norm_(plain->parameters(), most, type), 1e-5 * norm);
      expect_close(take_gradients(*alone), take_gradients(*plain));
    }
  }
  auto pipe = with_gradients(ranks);  // arguments of one rank are refused on all
  const bool here = ranks->rank() == 1;
  EXPECT_NE(message_from([&] { clip_grad_norm_(*pipe, here ? 0 : 1); }), "nothing");
  EXPECT_NE(message_from([&] { clip_grad_norm_(*pipe, 1, here ? -2 : 2); }), "nothing");
  EXPECT_NE(message_from([&] { unscale_grads_(*pipe, here ? kInfinity - kInfinity : 1); }), "nothing");
}

RANKS_TEST(WholeGradients, AreFiniteIfThoseOfAllRanksAre, 3) {
  auto over = with_gradients(ranks);
  auto alone = with_gradients(nullptr);
  EXPECT_TRUE(unscale_grads_(*over, 8));
  EXPECT_TRUE(unscale_grads_(*alone, 8));
  expect_part_of(gradients_of(over), gradients_of(alone));
  if (ranks->rank() == 1) over->parameters().front().mutable_grad()[0] = kInfinity;
  EXPECT_FALSE(unscale_grads_(*over, 1));
  EXPECT_THAT([&] { clip_grad_norm_(*over, 1, 2, /*error_if_nonfinite=*/true); }, throws<std::runtime_error>("inf"));
  if (ranks->rank() != 0) return;
  EXPECT_TRUE(torch::isfinite(over->parameters().front().grad()).all().item<bool>());
}

}  // namespace
}  // namespace gpipe
