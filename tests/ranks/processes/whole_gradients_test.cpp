// Clipping and unscaling over ranks have the bits of one process, which are PyTorch's up to rounding.

#include "gpipe/gradients.h"

#include <ATen/record_function.h>
#include <gtest/gtest.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/torch.h>

#include <limits>
#include <memory>
#include <string_view>
#include <vector>

#include "tests/gpipe/helpers.h"
#include "tests/gpipe/layers.h"
#include "tests/ranks/processes/job.h"

namespace gpipe {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

Sequential deep_model() {
  torch::manual_seed(4);
  return Sequential(Linear(6, 6), Stash("a"), torch::nn::Tanh(), Linear(6, 6), Pop("a"), Linear(6, 6));
}

GPipe with_gradients(const std::shared_ptr<Ranks>& ranks) {
  GPipe pipe(deep_model(), {2, 2, 2}, GPipeOptions().chunks(2).ranks(ranks));
  const auto x = torch::arange(48, torch::kFloat).view({8, 6}).sin();
  pipe->step(x, x.cos(), tensor_loss([](auto out, auto y) { return torch::mse_loss(out, y); }));
  return pipe;
}

void expect_same_gradients(GPipe& over, GPipe& alone) {
  const auto expected = alone->named_parameters();
  for (const auto& each : over->named_parameters()) {
    EXPECT_TRUE(same(each.value().grad(), expected[each.key()].grad())) << each.key();
  }
}

TEST(WholeGradients, AreClippedAsInOneProcess) {
  expect_job(3, [](const auto& ranks) {
    for (const double type : {2.0, 1.0, 3.0, kInfinity}) {
      for (const double most : {0.01, 100.0}) {
        auto over = with_gradients(ranks);
        auto alone = with_gradients(nullptr);
        auto plain = with_gradients(nullptr);
        const auto total = clip_grad_norm_(*over, most, type);
        EXPECT_TRUE(same(total, clip_grad_norm_(*alone, most, type)));
        expect_same_gradients(over, alone);
        const auto norm = total.template item<double>();
        EXPECT_NEAR(norm, torch::nn::utils::clip_grad_norm_(plain->parameters(), most, type), 1e-5 * norm);
        for (std::size_t p = 0; p < plain->parameters().size(); ++p) {
          EXPECT_TRUE(torch::allclose(alone->parameters()[p].grad(), plain->parameters()[p].grad(), 1e-5, 1e-8));
        }
      }
    }
  });
}

TEST(WholeGradients, AreFiniteIfThoseOfAllRanksAre) {
  expect_job(3, [](const auto& ranks) {
    auto over = with_gradients(ranks);
    auto alone = with_gradients(nullptr);
    EXPECT_TRUE(unscale_grads_(*over, 8));
    EXPECT_TRUE(unscale_grads_(*alone, 8));
    expect_same_gradients(over, alone);
    if (ranks->rank() == 1) over->parameters().front().mutable_grad()[0] = kInfinity;
    EXPECT_FALSE(unscale_grads_(*over, 1));
    EXPECT_THAT([&] { clip_grad_norm_(*over, 1, 2, /*error_if_nonfinite=*/true); }, throws<std::runtime_error>("inf"));
    if (ranks->rank() != 0) return;
    EXPECT_TRUE(torch::isfinite(over->parameters().front().grad()).all().template item<bool>());
  });
}

TEST(WholeGradients, AreReadAtOnce) {
  if (rank_of_this_process() >= 0) return;
  static thread_local int reads;
  reads = 0;
  auto pipe = with_gradients(nullptr);
  const auto counting = at::addThreadLocalCallback(
      at::RecordFunctionCallback([](const at::RecordFunction& call) -> std::unique_ptr<at::ObserverContext> {
        if (std::string_view(call.name()) == "aten::_local_scalar_dense") ++reads;
        return nullptr;
      }).scopes({at::RecordScope::FUNCTION}));
  clip_grad_norm_(*pipe, 0.01);
  unscale_grads_(*pipe, 8);
  at::removeCallback(counting);
  EXPECT_EQ(reads, 0);
}

TEST(WholeGradients, RefuseWrongArgumentsOnAllRanks) {
  expect_job(2, [](const auto& ranks) {
    auto pipe = with_gradients(ranks);
    const bool wrong = ranks->rank() == 1;
    EXPECT_ANY_THROW(clip_grad_norm_(*pipe, wrong ? 0 : 1));
    EXPECT_ANY_THROW(clip_grad_norm_(*pipe, 1, wrong ? -2 : 2));
    EXPECT_ANY_THROW(unscale_grads_(*pipe, wrong ? std::numeric_limits<double>::quiet_NaN() : 1));
    EXPECT_TRUE(unscale_grads_(*pipe, 1));
  });
}

}  // namespace
}  // namespace gpipe
