// Which tensors get gradients, how often their hooks run, and which tensors a layer must not differentiate by.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <atomic>
#include <tuple>

#include "tests/gpipe/helpers.h"
#include "tests/gpipe/layers.h"

namespace gpipe {
namespace {

TEST(Gradients, ReachAParametersHooksAndGradOnce) {
  auto model = mlp();
  GPipe pipe(model, {2, 2}, GPipeOptions().chunks(4));
  auto weight = model->parameters()[0];
  int calls = 0;
  weight.register_hook([&](const Tensor& gradient) {
    ++calls;
    return gradient * 2;
  });
  const auto x = torch::randn({8, 6});
  pipe->forward(x).sum().backward();
  EXPECT_EQ(calls, 1);
  const auto hooked = weight.grad().clone();
  const auto plain = torch::autograd::grad({pipe->forward(x).sum()}, {weight});
  EXPECT_EQ(calls, 2);
  EXPECT_TRUE(torch::allclose(plain[0], hooked));
  EXPECT_TRUE(same(weight.grad(), hooked)) << "grad() must not write .grad";
}

TEST(Gradients, SkipFrozenParametersAndInputs) {
  auto model = mlp();
  model->parameters()[0].requires_grad_(false);
  GPipe pipe(model, {2, 2}, GPipeOptions().chunks(2).checkpoint(Checkpoint::kAlways));
  const auto x = torch::randn({4, 6});
  pipe->forward(x).sum().backward();
  EXPECT_FALSE(model->parameters()[0].grad().defined());
  EXPECT_TRUE(model->parameters()[1].grad().defined());
  EXPECT_FALSE(x.grad().defined());
  for (auto& parameter : model->parameters()) parameter.requires_grad_(false);
  EXPECT_FALSE(pipe->forward(x).requires_grad());
}

TEST(Gradients, AreNotNeededByAMaskThatIsPassedOn) {
  struct MaskedImpl : torch::nn::Module {
    MaskedImpl() : linear(register_module("linear", Linear(6, 6))) {}
    std::tuple<Tensor, Tensor> forward(std::tuple<Tensor, Tensor> in) {
      if (torch::GradMode::is_enabled()) mask_required_grad = mask_required_grad || std::get<1>(in).requires_grad();
      return {linear(std::get<0>(in)) * std::get<1>(in), std::get<1>(in)};
    }
    Linear linear;
    std::atomic<bool> mask_required_grad = false;
  };
  for (const auto checkpoint : kModes) {
    auto first = std::make_shared<MaskedImpl>();
    auto second = std::make_shared<MaskedImpl>();
    GPipe pipe(Sequential(first, second), {1, 1}, GPipeOptions().chunks(2).checkpoint(checkpoint));
    const auto out = pipe->forward(Value(std::make_tuple(torch::randn({4, 6}), torch::ones({4, 6}))));
    EXPECT_TRUE(out.tensors()[0].requires_grad());
    EXPECT_FALSE(out.tensors()[1].requires_grad());
    out.tensors()[0].sum().backward();
    EXPECT_FALSE(first->mask_required_grad || second->mask_required_grad);
  }
}

TEST(Gradients, RefuseALeafThatIsNotAParameter) {
  const auto leaf = torch::ones({6}).requires_grad_();
  GPipe pipe(Sequential(Functional([leaf](Tensor x) { return x * leaf; })), {1}, GPipeOptions().chunks(2));
  for (const bool input_gradient : {false, true}) {
    EXPECT_THAT(
        [&] {
          pipe->forward(torch::ones({2, 6}).requires_grad_(input_gradient));
        },
        throws<std::invalid_argument>("neither a parameter nor an input"));
  }
}

TEST(Gradients, RefuseAGraphFromOutsideAndLeaveItWhole) {
  auto weight = torch::ones({6}).requires_grad_();
  const auto twice = weight * 2;
  GPipe pipe(Sequential(Functional([twice](Tensor x) { return x * twice; })), {1});
  for (const bool input_gradient : {false, true}) {
    EXPECT_THROW(pipe->forward(torch::ones({2, 6}).requires_grad_(input_gradient)), std::invalid_argument);
  }
  twice.sum().backward();
  EXPECT_TRUE(same(weight.grad(), torch::full({6}, 2.0)));
}

TEST(Gradients, RefuseATensorKeptFromAnotherMicroBatch) {
  Tensor kept = torch::zeros({1, 6});
  Sequential model(Linear(6, 6), Functional([&kept](Tensor x) {
                     const auto y = x + kept;
                     kept = x.slice(0, 0, 1);
                     return y;
                   }));
  GPipe pipe(model, {1, 1}, GPipeOptions().chunks(2).checkpoint(Checkpoint::kNever));
  EXPECT_THAT(
      [&] {
        pipe->forward(torch::randn({4, 6}));
      },
      throws<std::invalid_argument>("detach tensors that a layer keeps between calls"));
}

}  // namespace
}  // namespace gpipe
