// Models, balances, options and inputs that a pipeline refuses.
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/csrc/jit/frontend/tracer.h>
#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <limits>
#include <memory>

#include "absl/cleanup/cleanup.h"
#include "gpipe/ranks.h"
#include "tests/gpipe/helpers.h"

namespace gpipe {
namespace {

constexpr auto kHuge = std::numeric_limits<std::int64_t>::max();

Sequential four_layers() { return Sequential(Linear(6, 6), torch::nn::Tanh(), Linear(6, 6), torch::nn::Tanh()); }

TEST(Refusal, OfBalances) {
  const auto make = [](Balance balance) { GPipe pipe(four_layers(), std::move(balance)); };
  EXPECT_THROW(make({}), std::invalid_argument);
  EXPECT_THROW(make({2, 1}), std::invalid_argument);
  EXPECT_THROW(make({4, 0}), std::invalid_argument);
  EXPECT_THROW(make({5, -1}), std::invalid_argument);
  EXPECT_THROW(GPipe(Sequential(), {}), std::invalid_argument);
}

TEST(Refusal, OfBalancesWhoseSumOverflows) {
  Sequential model;
  for (int i = 0; i < 39; ++i) model->push_back(torch::nn::Identity());
  const auto make = [&](Balance balance) { GPipe pipe(model, std::move(balance)); };
  // The first sums to 39 in 64 bits, the second in 32 bits.
  EXPECT_THAT(
      [&] {
        make({kHuge, kHuge, 41});
      },
      throws<std::invalid_argument>(
          "balance [9223372036854775807, 9223372036854775807, 41] sums to more than 2147483647"));
  EXPECT_THAT([&] { make({std::int64_t{1} << 32, 39}); }, throws<std::invalid_argument>("sums to"));
  EXPECT_THAT([&] { make({40, -1}); }, throws<std::invalid_argument>("at least one layer"));
  EXPECT_THAT(
      [&] {
        make({20, 20});
      },
      throws<std::invalid_argument>("balance [20, 20] sums to 40, but the model has 39 layers"));
}

TEST(Refusal, OfNcclWithoutGpus) {
  const auto make = [] {
    const auto options = RanksOptions().nccl(true);
    const auto ranks = std::make_shared<Ranks>(c10::make_intrusive<c10d::HashStore>(), 0, 1, options);
    GPipe pipe(four_layers(), {2, 2}, GPipeOptions().devices({torch::kCPU, torch::kCPU}).ranks(ranks));
  };
  EXPECT_THAT(make, ::testing::ThrowsMessage<std::invalid_argument>(
                        ::testing::AnyOf(::testing::HasSubstr("worker 0, of rank 0, is on cpu"),
                                         ::testing::HasSubstr("this gpipe was built without NCCL"))));
}

TEST(Refusal, OfOptions) {
  const auto make = [](GPipeOptions options) { GPipe pipe(four_layers(), {2, 2}, std::move(options)); };
  EXPECT_THROW(make(GPipeOptions().chunks(0)), std::invalid_argument);
  EXPECT_THROW(make(GPipeOptions().split_size(-1)), std::invalid_argument);
  EXPECT_THROW(make(GPipeOptions().chunks(2).split_size(2)), std::invalid_argument);
  EXPECT_THROW(make(GPipeOptions().intraop_threads(-1)), std::invalid_argument);
  EXPECT_THROW(make(GPipeOptions().devices({torch::kCPU})), std::out_of_range);
  EXPECT_THROW(make(GPipeOptions().devices({torch::kCPU, torch::Device("cuda:63")})), std::out_of_range);
  EXPECT_THROW(make(GPipeOptions().devices({torch::kCPU, torch::kMeta})), std::out_of_range);
}

TEST(Refusal, OfSharedLayers) {
  auto linear = Linear(2, 2);
  EXPECT_THROW(GPipe(Sequential(linear, linear), {1, 1}), std::invalid_argument);
}

TEST(Refusal, OfTensorsThatBelongToTheSequential) {
  Sequential model(Linear(6, 6));
  model->register_buffer("scale", torch::ones({1}));
  EXPECT_THAT([&] { GPipe(model, {1}); }, throws<std::invalid_argument>("has a buffer of its own, 'scale'"));
  NestedSequential nested({{"linear", Linear(6, 6)}});
  nested->register_parameter("weight", torch::ones({1}));
  EXPECT_THAT([&] { GPipe(nested, {1}); }, throws<std::invalid_argument>("has a parameter of its own, 'weight'"));
}

TEST(Refusal, OfInputsThatCannotBeCut) {
  GPipe pipe(four_layers(), {2, 2}, GPipeOptions().chunks(2));
  EXPECT_THROW(pipe->forward(Tensor()), std::invalid_argument);
  EXPECT_THROW(pipe->forward(torch::tensor(1.0)), std::invalid_argument);
  EXPECT_THROW(pipe->forward(std::vector<Tensor>{}), std::invalid_argument);
  EXPECT_THROW(pipe->forward({torch::zeros({4, 6}), torch::zeros({3, 6})}), std::invalid_argument);
}

TEST(Refusal, OfNumbersOfMicroBatches) {
  GPipe pipe(Sequential(torch::nn::Identity(), torch::nn::Identity()), {1, 1}, GPipeOptions().chunks(kHuge));
  EXPECT_EQ(pipe->forward(torch::ones({3, 1})).size(0), 3);
  EXPECT_THAT([&] { pipe->program(0); }, throws<std::invalid_argument>("must be positive, but is 0"));
  EXPECT_THAT([&] { pipe->program(std::numeric_limits<int>::max()); },
              throws<std::invalid_argument>("2 stages and 2147483647 micro-batches"));
  const auto samples = torch::ones({1, 1}).expand({std::int64_t{1} << 40, 1});
  EXPECT_THAT([&] { pipe->forward(samples); }, throws<std::invalid_argument>("1099511627776 micro-batches"));
}

TEST(Refusal, OfForwardModeDerivatives) {
  auto linear = Linear(6, 6);
  GPipe pipe(Sequential(linear), {1});
  const auto x = torch::randn({4, 6});
  const auto level = torch::autograd::ForwardADLevel::get_next_idx();
  const auto refused = [&](const Tensor& input) {
    EXPECT_THAT([&] { pipe->forward(input); }, throws<c10::NotImplementedError>("has a tangent"));
  };
  EXPECT_EQ(pipe->forward(x).size(0), 4) << "no tensor has a tangent";
  refused(at::_make_dual(x, torch::ones({4, 6}), static_cast<std::int64_t>(level)));
  linear->weight.detach()._set_fw_grad(torch::ones({6, 6}), level, /*is_inplace_op=*/false);
  EXPECT_EQ(pipe->forward(x).size(0), 4) << "another tensor has a tangent";
  linear->weight._set_fw_grad(torch::ones({6, 6}), level, /*is_inplace_op=*/false);
  refused(x);
  torch::autograd::ForwardADLevel::release_idx(level);
  EXPECT_EQ(pipe->forward(x).size(0), 4);
}

TEST(Refusal, OfTracingByTorchScript) {
  GPipe pipe(Sequential(Linear(6, 6)), {1});
  {
    torch::jit::tracer::setTracingState(std::make_shared<torch::jit::tracer::TracingState>());
    const absl::Cleanup end = [] { torch::jit::tracer::setTracingState(nullptr); };
    EXPECT_THAT([&] { pipe->forward(torch::ones({4, 6})); }, throws<c10::NotImplementedError>("torch.jit.trace"));
  }
  EXPECT_EQ(pipe->forward(torch::randn({4, 6})).size(0), 4);
}

TEST(Refusal, OfTransformsOfTorchFunc) {
  GPipe pipe(Sequential(Linear(6, 6)), {1});
  const auto x = torch::ones({4, 6});
  {
    const c10::impl::IncludeDispatchKeyGuard transform(c10::DispatchKey::FuncTorchDynamicLayerFrontMode);
    EXPECT_THAT([&] { pipe->forward(x); }, throws<c10::NotImplementedError>("torch.func"));
  }
  EXPECT_EQ(pipe->forward(x).size(0), 4);
}

}  // namespace
}  // namespace gpipe
