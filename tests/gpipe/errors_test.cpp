// Errors of a call: the exception, last_error(), and the state that is restored.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <stdexcept>

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
    for (const auto& parameter : model->parameters()) EXPECT_FALSE(parameter.grad().defined());
    torch::manual_seed(3);
    pipe->forward(x).sum().backward();
    torch::manual_seed(3);
    healthy->forward(x).sum().backward();
    EXPECT_FALSE(pipe->last_error().has_value());
    for (std::size_t i = 0; i < model->parameters().size(); ++i) {
      EXPECT_TRUE(same(model->parameters()[i].grad(), twin->parameters()[i].grad()));
    }
    EXPECT_TRUE(same(model->buffers(), twin->buffers()));
    model->zero_grad();
    twin->zero_grad();
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

TEST(Errors, OfARefusedCallClearTheLastError) {
  GPipe pipe(Sequential(Linear(6, 6), Linear(5, 5)), {1, 1});
  EXPECT_THROW(pipe->forward(torch::randn({4, 6})), c10::Error);
  EXPECT_TRUE(pipe->last_error().has_value());
  EXPECT_THROW(pipe->forward(Tensor()), std::invalid_argument);
  EXPECT_FALSE(pipe->last_error().has_value());
}

TEST(Errors, OfTorchNameTheStage) {
  GPipe pipe(Sequential(Linear(6, 6), Linear(5, 5)), {1, 1}, GPipeOptions().chunks(2));
  EXPECT_THAT([&] { pipe->forward(torch::randn({4, 6})); }, throws<c10::Error>("stage 1"));
  EXPECT_EQ(pipe->last_error()->layer, 1);
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
    GrowImpl() : seen(register_buffer("seen", torch::zeros({1}))) {}
    Tensor forward(Tensor x) {
      seen.resize_({seen.size(0) + 1});
      TORCH_CHECK(!fail, "on purpose");
      return x * 2;
    }
    Tensor seen;
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

}  // namespace
}  // namespace gpipe
