// In-place changes of inputs, activations and parameters.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tests/gpipe/helpers.h"
#include "tests/gpipe/layers.h"

namespace gpipe {
namespace {

// Micro-batches are views of one tensor, so each needs a version counter of its own.
TEST(InPlace, WorksAtTheHeadOfTheModel) {
  const auto relu = [] { return torch::nn::ReLU(torch::nn::ReLUOptions(true)); };
  auto linear = Linear(6, 6);
  const auto x = torch::randn({6, 6});
  const auto gradient_of = [&](const Tensor& loss) { return torch::autograd::grad({loss}, {linear->weight})[0]; };
  const auto expected = gradient_of(linear(x.relu()).sum());
  const auto expected_of_skip = gradient_of((linear(x.relu() * 1.5) + x.relu().tanh()).sum());
  for (const auto checkpoint : kModes) {
    const auto options = GPipeOptions().chunks(3).checkpoint(checkpoint);
    for (int step = 0; step < 2; ++step) {
      GPipe head(Sequential(relu(), linear), {2}, options);
      EXPECT_TRUE(torch::allclose(gradient_of(head->forward(x.clone()).sum()), expected));
      GPipe alone(Sequential(relu(), linear), {1, 1}, options);
      EXPECT_TRUE(torch::allclose(gradient_of(alone->forward(x.clone()).sum()), expected));
      GPipe flat(Sequential(torch::nn::Flatten(), relu(), linear), {1, 2}, options);
      EXPECT_TRUE(torch::allclose(gradient_of(flat->forward(x.clone().view({6, 2, 3})).sum()), expected));
      GPipe skip(Sequential(relu(), Stash("a"), linear, Pop("a")), {3, 1}, options);
      EXPECT_TRUE(torch::allclose(gradient_of(skip->forward(x.clone()).sum()), expected_of_skip));
    }
  }
}

// A graph of the caller that has saved the input must refuse to use it.
TEST(InPlace, AdvancesTheVersionOfTheCallersTensors) {
  const auto relu = torch::nn::ReLU(torch::nn::ReLUOptions(true));
  const auto weight = torch::rand({6}).requires_grad_();
  for (const auto checkpoint : kModes) {
    for (const int chunks : {1, 3}) {
      GPipe pipe(Sequential(relu, Linear(6, 6)), {1, 1}, GPipeOptions().chunks(chunks).checkpoint(checkpoint));
      const auto x = torch::randn({6, 6});
      const auto of_caller = (weight * x).sum();
      pipe->forward(x).sum().backward();
      EXPECT_THAT([&] { of_caller.backward(); }, throws<c10::Error>("modified by an inplace operation"));

      const auto version = x._version();
      pipe->step(x, x.clone(), [](const Value& output, const Value& target) {
        return torch::mse_loss(output.tensor(), target.tensor());
      });
      EXPECT_GT(x._version(), version);
    }
  }
  GPipe pipe(Sequential(Linear(6, 6)), {1});
  const auto x = torch::randn({6, 6});
  pipe->forward(x);
  EXPECT_EQ(x._version(), 0u);
}

TEST(InPlace, ChangesOfAnInputBeforeItsBackwardAreErrors) {
  for (const auto checkpoint : kModes) {
    GPipe pipe(Sequential(Linear(6, 6)), {1}, GPipeOptions().chunks(3).checkpoint(checkpoint));
    auto x = torch::randn({6, 6});
    const auto loss = pipe->forward(x).sum();
    x.zero_();
    EXPECT_THAT([&] { loss.backward(); }, throws<std::runtime_error>("an input was changed in place"));
  }
}

TEST(InPlace, ChangesOfParametersBeforeTheBackwardAreErrors) {
  for (const auto checkpoint : kModes) {
    auto linear = Linear(6, 6);
    GPipe pipe(Sequential(linear, torch::nn::Tanh(), Linear(6, 6)), {2, 1},
               GPipeOptions().chunks(2).checkpoint(checkpoint));
    const auto loss = pipe->forward(torch::randn({4, 6}).requires_grad_()).sum();
    {
      torch::NoGradGuard no_grad;
      linear->weight.mul_(2);
    }
    EXPECT_ANY_THROW(loss.backward());
    EXPECT_FALSE(linear->weight.grad().defined());
  }
}

TEST(InPlace, AStageThatChangesItsInputIsRecomputedTwiceFromTheSameInput) {
  auto model =
      Sequential(Linear(6, 6), Functional([](Tensor x) { return x.mul_(3); }), torch::nn::Tanh(), Linear(6, 6));
  for (const auto& balance : {Balance{1, 3}, Balance{1, 1, 1, 1}}) {
    GPipe pipe(model, balance, GPipeOptions().chunks(2).checkpoint(Checkpoint::kAlways));
    const auto x = torch::randn({4, 6}).requires_grad_();
    const auto loss = pipe->forward(x).square().sum();
    const auto first = torch::autograd::grad({loss}, {x}, {}, /*retain_graph=*/true)[0];
    const auto second = torch::autograd::grad({loss}, {x})[0];
    EXPECT_TRUE(same(first, second));
  }
}

TEST(InPlace, AStageThatBeginsToChangeItsInputFailsOnceAndThenWorks) {
  bool in_place = false;
  auto model = Sequential(Linear(6, 6), Functional([&in_place](Tensor x) { return in_place ? x.mul_(2) : x * 2; }),
                          Linear(6, 6));
  GPipe pipe(model, {1, 2}, GPipeOptions().chunks(2).checkpoint(Checkpoint::kAlways));
  const auto x = torch::randn({4, 6}).requires_grad_();
  const auto gradient = [&] { return torch::autograd::grad({pipe->forward(x).sum()}, {x})[0]; };
  const auto expected = gradient();
  in_place = true;
  EXPECT_THAT(gradient, throws<std::runtime_error>("in place"));
  EXPECT_TRUE(same(gradient(), expected));
}

struct InPlaceParameterImpl : torch::nn::Module {
  explicit InPlaceParameterImpl(bool view) : weight(register_parameter("weight", torch::full({6}, 2.0))), view(view) {}
  Tensor forward(Tensor x) {
    if (!view) return x.add_(weight);
    auto y = x * 3;
    y.narrow(1, 0, 6).mul_(weight);
    return y;
  }
  Tensor weight;
  bool view;
};
TORCH_MODULE(InPlaceParameter);

TEST(InPlace, OperationsWithAParameterGiveItsGradient) {
  for (const bool view : {false, true}) {
    InPlaceParameter layer(view);
    const auto x = torch::ones({4, 6});
    layer->forward(x.clone()).sum().backward();
    const auto expected = layer->weight.grad().clone();
    for (const auto checkpoint : kModes) {
      layer->zero_grad();
      GPipe pipe(Sequential(layer, torch::nn::Identity()), {1, 1}, GPipeOptions().chunks(2).checkpoint(checkpoint));
      pipe->forward(x.clone()).sum().backward();
      EXPECT_TRUE(same(layer->weight.grad(), expected));
    }
  }
}

}  // namespace
}  // namespace gpipe
