// Errors of a call: the exception, last_error(), and the state that is restored. Models, balances, options and inputs that
// a pipeline refuses.
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/csrc/jit/frontend/tracer.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "gpipe/ranks.h"
#include "tests/gpipe/instruments.h"
#include "tests/gpipe/layers.h"

namespace gpipe {
namespace {

struct Thrown : std::exception {
  const char* what() const noexcept override { return "injected"; }
};

// fault_test.cpp checks that they leave no trace.
TEST(Errors, AreTheLayersOwnAndNameTheirPlaceUntilTheNextCall) {
  auto plan = std::make_shared<FaultPlan>();
  GPipe pipe(Sequential(Linear(6, 6), torch::nn::Tanh(), Faulty(plan), Linear(6, 6)), {1, 3},
             in_chunks(3, Checkpoint::kAlways));
  const auto x = torch::randn({6, 6});
  for (const auto where : {FaultPlan::kForward, FaultPlan::kRecompute, FaultPlan::kBackward}) {
    plan->arm(where, [] { throw Thrown(); });
    if (where == FaultPlan::kForward) {
      EXPECT_THROW(pipe->forward(x), Thrown);
    } else {
      const auto loss = pipe->forward(x).sum();
      EXPECT_THROW(loss.backward(), Thrown);
      EXPECT_THROW(loss.backward(), c10::Error);
    }
    const auto error = pipe->last_error();
    ASSERT_TRUE(error);
    EXPECT_EQ(error->action.stage, 1);
    EXPECT_EQ(error->message, "injected");
    if (where != FaultPlan::kBackward) {
      EXPECT_EQ(error->layer, 2);
      EXPECT_EQ(error->layer_name, "2");
    }
    plan->disarm();
    pipe->forward(x).sum().backward();
    EXPECT_FALSE(pipe->last_error());
  }
}

TEST(Errors, AreTheSameObjectsThatLayersThrew) {
  auto plan = std::make_shared<FaultPlan>();
  GPipe pipe(Sequential(Linear(6, 6), Faulty(plan)), {1, 1});
  const auto thrown = std::make_exception_ptr(Thrown());
  plan->arm(FaultPlan::kForward, [&thrown] { std::rethrow_exception(thrown); });
  try {
    pipe->forward(torch::randn({4, 6}));
    FAIL() << "expected an error";
  } catch (const Thrown&) {
    EXPECT_EQ(std::current_exception(), thrown);
  }
}

TEST(Errors, OtherThanExceptionsBecomeRuntimeErrorsInARecompute) {
  auto plan = std::make_shared<FaultPlan>();
  GPipe pipe(Sequential(Linear(6, 6), Faulty(plan)), {1, 1}, in_chunks(2, Checkpoint::kAlways));
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
  GPipe pipe(Sequential(Linear(6, 6), Linear(5, 5)), {1, 1}, in_chunks(2));
  EXPECT_THAT([&] { pipe->forward(torch::randn({4, 6})); }, throws<c10::Error>("stage 1"));
  EXPECT_EQ(pipe->last_error()->layer, 1);
  EXPECT_THROW(pipe->forward(Tensor()), std::invalid_argument);
  EXPECT_FALSE(pipe->last_error().has_value());
}

TEST(Errors, BetweenLayersNameNoLayer) {
  const SkipFunction forgetful(Skippable::Names{.stash = {"s"}}, [](Tensor x, SkipFunctionImpl&) { return x; });
  GPipe pipe(Sequential(forgetful, Linear(6, 6), Pop("s")), {2, 1});
  EXPECT_THROW(pipe->forward(torch::randn({4, 6})), std::runtime_error);
  ASSERT_TRUE(pipe->last_error());
  EXPECT_EQ(pipe->last_error()->layer, -1);
}

TEST(Errors, OfJoiningOutputsLeaveNoTrace) {
  auto norm = torch::nn::BatchNorm1d(6);
  GPipe pipe(Sequential(norm, Functional([](Tensor x) { return x.sum(); })), {1, 1}, in_chunks(2));
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
  GPipe pipe(Sequential(grow), {1}, in_chunks(2, Checkpoint::kAlways));
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
  for (const auto& it : wrong) EXPECT_THAT([&] { GPipe(model, it.first); }, refused(it.second));
  EXPECT_THAT([] { GPipe(Sequential(), {}); }, refused(""));
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
  for (const auto& options :
       {in_chunks(0), GPipeOptions().split_size(-1), in_chunks(2).split_size(2), GPipeOptions().intraop_threads(-1)}) {
    EXPECT_THROW(GPipe(mlp(), {2, 2}, options), std::invalid_argument);
  }
  using Devices = std::vector<torch::Device>;
  for (const auto& devices :
       {Devices{torch::kCPU}, Devices{torch::kCPU, torch::Device("cuda:63")}, Devices{torch::kCPU, torch::kMeta}}) {
    EXPECT_THROW(GPipe(mlp(), {2, 2}, GPipeOptions().devices(devices)), std::out_of_range);
  }
}

TEST(Refusal, OfModels) {
  const Linear linear(6, 6);
  EXPECT_THROW(GPipe(Sequential(linear, linear), {1, 1}), std::invalid_argument);
  Sequential model(linear);
  model->register_buffer("scale", torch::ones({1}));
  EXPECT_THAT([&] { GPipe(model, {1}); }, refused("has a buffer of its own, 'scale'"));
  NestedSequential nested({{"linear", linear}});
  nested->register_parameter("weight", torch::ones({1}));
  EXPECT_THAT([&] { GPipe(nested, {1}); }, refused("has a parameter of its own, 'weight'"));
}

TEST(Refusal, OfInputsThatCannotBeCut) {
  GPipe pipe(mlp(), {2, 2}, in_chunks(2));
  for (const auto& input : {Value(Tensor()), Value(torch::tensor(1.0)), Value(std::vector<Tensor>()),
                            Value(std::vector<Tensor>{torch::zeros({4, 6}), torch::zeros({3, 6})})}) {
    EXPECT_THROW(pipe->forward(input), std::invalid_argument);
  }
}

TEST(Refusal, OfNumbersOfMicroBatches) {
  GPipe pipe(Sequential(torch::nn::Identity(), torch::nn::Identity()), {1, 1}, in_chunks(kHuge));
  EXPECT_EQ(pipe->forward(torch::ones({3, 1})).size(0), 3);
  EXPECT_THAT([&] { pipe->program(0); }, refused("must be positive, but is 0"));
  EXPECT_THAT([&] { pipe->program(std::numeric_limits<int>::max()); },
              refused("2 stages and 2147483647 micro-batches"));
  const auto samples = torch::ones({1, 1}).expand({std::int64_t{1} << 40, 1});
  EXPECT_THAT([&] { pipe->forward(samples); }, refused("1099511627776 micro-batches"));
}

TEST(Refusal, OfForwardModeDerivatives) {
  auto linear = Linear(6, 6);
  GPipe pipe(Sequential(linear), {1});
  const auto x = torch::randn({4, 6});
  const auto level = torch::autograd::ForwardADLevel::get_next_idx();
  const auto expect_refused = [&](const Tensor& input) {
    EXPECT_THAT([&] { pipe->forward(input); }, throws<c10::NotImplementedError>("has a tangent"));
  };
  EXPECT_EQ(pipe->forward(x).size(0), 4) << "no tensor has a tangent";
  expect_refused(at::_make_dual(x, torch::ones({4, 6}), static_cast<std::int64_t>(level)));
  linear->weight.detach()._set_fw_grad(torch::ones({6, 6}), level, /*is_inplace_op=*/false);
  EXPECT_EQ(pipe->forward(x).size(0), 4) << "another tensor has a tangent";
  linear->weight._set_fw_grad(torch::ones({6, 6}), level, /*is_inplace_op=*/false);
  expect_refused(x);
  torch::autograd::ForwardADLevel::release_idx(level);
  EXPECT_EQ(pipe->forward(x).size(0), 4);
}

TEST(Refusal, OfTracingByTorchScriptAndTransformsOfTorchFunc) {
  GPipe pipe(Sequential(Linear(6, 6)), {1});
  const auto call = [&pipe, x = torch::ones({4, 6})] { pipe->forward(x); };
  {
    torch::jit::tracer::setTracingState(std::make_shared<torch::jit::tracer::TracingState>());
    const absl::Cleanup end = [] { torch::jit::tracer::setTracingState(nullptr); };
    EXPECT_THAT(call, throws<c10::NotImplementedError>("torch.jit.trace"));
  }
  EXPECT_NO_THROW(call());
  {
    const c10::impl::IncludeDispatchKeyGuard transform(c10::DispatchKey::FuncTorchDynamicLayerFrontMode);
    EXPECT_THAT(call, throws<c10::NotImplementedError>("torch.func"));
  }
  EXPECT_NO_THROW(call());
}

}  // namespace
}  // namespace gpipe
