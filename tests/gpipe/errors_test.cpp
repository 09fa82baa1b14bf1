// Errors of a call: the exception, last_error(), and the state that is restored. Models, balances, options and inputs that
// a pipeline refuses.
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/csrc/jit/frontend/tracer.h>
#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "gpipe/ranks.h"
#include "tests/gpipe/helpers.h"
#include "tests/gpipe/instruments.h"
#include "tests/gpipe/layers.h"

namespace gpipe {
namespace {

struct Thrown : std::exception {
  const char* what() const noexcept override { return "injected"; }
};

TEST(Errors, AreTheLayersOwnAndLeaveNoTrace) {
  auto plan = std::make_shared<FaultPlan>();
  const auto build = [](std::shared_ptr<FaultPlan> faults) {
    torch::manual_seed(9);
    return Sequential(Linear(6, 6), torch::nn::BatchNorm1d(6), torch::nn::Dropout(0.5), Faulty(faults), Linear(6, 6));
  };
  auto model = build(plan);
  auto twin = build(std::make_shared<FaultPlan>());
  const auto options = GPipeOptions().chunks(3).checkpoint(Checkpoint::kAlways);
  GPipe pipe(model, {2, 3}, options);
  GPipe healthy(twin, {2, 3}, options);
  const auto x = torch::randn({6, 6});
  for (const auto where : {FaultPlan::kForward, FaultPlan::kRecompute, FaultPlan::kBackward}) {
    const auto state = generator_state();
    plan->arm(where, [] { throw Thrown(); });
    if (where == FaultPlan::kForward) {
      EXPECT_THROW(pipe->forward(x), Thrown);
      EXPECT_TRUE(same(generator_state(), state));
    } else {
      const auto loss = pipe->forward(x).sum();
      EXPECT_THROW(loss.backward(), Thrown);
      EXPECT_THROW(loss.backward(), c10::Error);
      healthy->forward(x);
    }
    const auto error = pipe->last_error();
    ASSERT_TRUE(error.has_value());
    EXPECT_EQ(error->action.stage, 1);
    EXPECT_EQ(error->message, "injected");
    if (where != FaultPlan::kBackward) {
      EXPECT_EQ(error->layer, 3);
      EXPECT_EQ(error->layer_name, "3");
    }
    plan->disarm();
    EXPECT_TRUE(same(take_gradients(*model), std::vector<Tensor>(6)));
    torch::manual_seed(3);
    pipe->forward(x).sum().backward();
    torch::manual_seed(3);
    healthy->forward(x).sum().backward();
    EXPECT_FALSE(pipe->last_error().has_value());
    EXPECT_TRUE(same(buffers_and_gradients(*model), buffers_and_gradients(*twin)));
  }
}

TEST(Errors, AreTheSameObjectsThatLayersThrew) {
  auto plan = std::make_shared<FaultPlan>();
  GPipe pipe(Sequential(Linear(6, 6), Faulty(plan)), {1, 1});
  std::exception_ptr thrown;
  plan->arm(FaultPlan::kForward, [&thrown] {
    thrown = std::make_exception_ptr(Thrown());
    std::rethrow_exception(thrown);
  });
  try {
    pipe->forward(torch::randn({4, 6}));
    FAIL() << "expected an error";
  } catch (const Thrown&) {
    EXPECT_EQ(std::current_exception(), thrown);
  }
}

TEST(Errors, OtherThanExceptionsBecomeRuntimeErrorsInARecompute) {
  auto plan = std::make_shared<FaultPlan>();
  GPipe pipe(Sequential(Linear(6, 6), Faulty(plan)), {1, 1}, GPipeOptions().chunks(2).checkpoint(Checkpoint::kAlways));
  const auto x = torch::randn({4, 6});
  for (int i = 0; i < 100; ++i) {  // PyTorch's engine crashes after about sixty that are not exceptions
    const auto loss = pipe->forward(x).sum();
    plan->arm(FaultPlan::kRecompute, [] { throw 7; });
    EXPECT_THROW(loss.backward(), std::runtime_error);
    EXPECT_EQ(pipe->last_error()->message, "unknown");
    plan->disarm();
  }
  EXPECT_NO_THROW(pipe->forward(x).sum().backward());
}

TEST(Errors, OfTorchNameTheStageUntilTheNextCall) {
  GPipe pipe(Sequential(Linear(6, 6), Linear(5, 5)), {1, 1}, GPipeOptions().chunks(2));
  EXPECT_THAT([&] { pipe->forward(torch::randn({4, 6})); }, throws<c10::Error>("stage 1"));
  EXPECT_EQ(pipe->last_error()->layer, 1);
  EXPECT_THROW(pipe->forward(Tensor()), std::invalid_argument);
  EXPECT_FALSE(pipe->last_error().has_value());
}

TEST(Errors, BetweenLayersNameNoLayer) {
  struct ForgetfulImpl : torch::nn::Module, Skippable {
    ForgetfulImpl() : Skippable({.stash = {"s"}}) {}
    Tensor forward(Tensor x) { return x; }
  };
  GPipe pipe(Sequential(std::make_shared<ForgetfulImpl>(), Linear(6, 6), Pop("s")), {2, 1});
  EXPECT_THROW(pipe->forward(torch::randn({4, 6})), std::runtime_error);
  ASSERT_TRUE(pipe->last_error());
  EXPECT_EQ(pipe->last_error()->layer, -1);
}

TEST(Errors, OfJoiningOutputsLeaveNoTrace) {
  auto norm = torch::nn::BatchNorm1d(6);
  GPipe pipe(Sequential(norm, Functional([](Tensor x) { return x.sum(); })), {1, 1}, GPipeOptions().chunks(2));
  const auto x = torch::randn({4, 6});
  const auto state = generator_state();
  EXPECT_THAT([&] { pipe->forward(x); }, throws<std::runtime_error>("cannot be joined"));
  EXPECT_FALSE(pipe->last_error()) << "no action failed";
  EXPECT_EQ(norm->num_batches_tracked.item<std::int64_t>(), 0);
  EXPECT_TRUE(same(generator_state(), state));
}

TEST(Errors, RestoreABufferThatChangedItsShape) {
  struct GrowImpl : torch::nn::Module {
    Tensor forward(Tensor x) {
      seen.resize_({seen.size(0) + 1});
      TORCH_CHECK(!fail, "on purpose");
      return x * 2;
    }
    Tensor seen = register_buffer("seen", torch::zeros({1}));
    bool fail = true;
  };
  auto grow = std::make_shared<GrowImpl>();
  GPipe pipe(Sequential(grow), {1}, GPipeOptions().chunks(2).checkpoint(Checkpoint::kAlways));
  EXPECT_THROW(pipe->forward(torch::randn({4, 6})), c10::Error);
  EXPECT_EQ(grow->seen.size(0), 1);
  grow->fail = false;
  pipe->forward(torch::randn({4, 6}).requires_grad_()).sum().backward();
  EXPECT_EQ(grow->seen.size(0), 3) << "once per micro-batch";
}

TEST(Errors, UndoALayersChangeOfItsParameter) {
  torch::manual_seed(1);
  auto table = torch::nn::Embedding(torch::nn::EmbeddingOptions(4, 6).max_norm(0.5));
  GPipe pipe(Sequential(table, Linear(5, 5)), {1, 1});
  const auto before = table->weight.detach().clone();
  EXPECT_THROW(pipe->forward(torch::tensor({0, 1})), c10::Error);
  EXPECT_TRUE(torch::equal(table->weight, before));
}

constexpr auto kHuge = std::numeric_limits<std::int64_t>::max();

TEST(Refusal, OfBalances) {
  Sequential model;
  for (int i = 0; i < 39; ++i) model->push_back(torch::nn::Identity());
  // The first sums to 39 in 64 bits, the second in 32 bits.
  const std::vector<std::pair<Balance, std::string>> wrong = {
      {{kHuge, kHuge, 41}, "balance [9223372036854775807, 9223372036854775807, 41] sums to more than 2147483647"},
      {{std::int64_t{1} << 32, 39}, "sums to"},
      {{40, -1}, "at least one layer"},
      {{39, 0}, "at least one layer"},
      {{20, 20}, "balance [20, 20] sums to 40, but the model has 39 layers"},
      {{20, 18}, "balance [20, 18] sums to 38, but the model has 39 layers"},
      {Balance(), ""}};
  for (const auto& it : wrong) {
    EXPECT_THAT([&] { GPipe(model, it.first); }, throws<std::invalid_argument>(it.second));
  }
  EXPECT_THROW(GPipe(Sequential(), {}), std::invalid_argument);
}

TEST(Refusal, OfNcclWithoutGpus) {
  const auto make = [] {
    const auto options = RanksOptions().nccl(true);
    const auto ranks = std::make_shared<Ranks>(c10::make_intrusive<c10d::HashStore>(), 0, 1, options);
    GPipe pipe(mlp(), {2, 2}, GPipeOptions().devices({torch::kCPU, torch::kCPU}).ranks(ranks));
  };
  EXPECT_THAT(make, ::testing::ThrowsMessage<std::invalid_argument>(
                        ::testing::AnyOf(::testing::HasSubstr("worker 0, of rank 0, is on cpu"),
                                         ::testing::HasSubstr("this gpipe was built without NCCL"))));
}

TEST(Refusal, OfOptions) {
  const auto make = [](GPipeOptions options) { GPipe pipe(mlp(), {2, 2}, std::move(options)); };
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
  GPipe pipe(mlp(), {2, 2}, GPipeOptions().chunks(2));
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

TEST(Refusal, OfTracingByTorchScriptAndTransformsOfTorchFunc) {
  GPipe pipe(Sequential(Linear(6, 6)), {1});
  const auto x = torch::ones({4, 6});
  const auto refused = [&](const std::string& what) {
    EXPECT_THAT([&] { pipe->forward(x); }, throws<c10::NotImplementedError>(what));
  };
  {
    torch::jit::tracer::setTracingState(std::make_shared<torch::jit::tracer::TracingState>());
    const absl::Cleanup end = [] { torch::jit::tracer::setTracingState(nullptr); };
    refused("torch.jit.trace");
  }
  EXPECT_EQ(pipe->forward(x).size(0), 4);
  {
    const c10::impl::IncludeDispatchKeyGuard transform(c10::DispatchKey::FuncTorchDynamicLayerFrontMode);
    refused("torch.func");
  }
  EXPECT_EQ(pipe->forward(x).size(0), 4);
}

}  // namespace
}  // namespace gpipe
