// Skips across stages: what may travel, and what is refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>

#include "gpipe/gpipe.h"
#include "tests/gpipe/layers.h"

namespace gpipe {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;
using torch::Tensor;
using torch::nn::Linear;
using torch::nn::Sequential;

constexpr Checkpoint kModes[] = {Checkpoint::kNever, Checkpoint::kExceptLast, Checkpoint::kAlways};

/// A Skippable made of a function, which may misbehave.
struct LambdaImpl : torch::nn::Module, Skippable {
  using Function = std::function<Tensor(LambdaImpl&, Tensor)>;
  LambdaImpl(Names names, Function function) : Skippable(std::move(names)), function(std::move(function)) {}
  Tensor forward(Tensor x) { return function(*this, std::move(x)); }
  using Skippable::pop;
  using Skippable::stash;
  Function function;
};
TORCH_MODULE(Lambda);

Lambda stashing(LambdaImpl::Function function) { return Lambda(Skippable::Names{.stash = {"s"}}, std::move(function)); }
Lambda popping(LambdaImpl::Function function) { return Lambda(Skippable::Names{.pop = {"s"}}, std::move(function)); }

TEST(SkipEdgesTest, GoStraightFromStashToPop) {
  auto model = Sequential(Stash("a"), Linear(6, 6), Linear(6, 6), Pop("a"));
  GPipe pipe(model, std::vector<std::int64_t>{1, 1, 1, 1});
  const auto program = pipe->program(2);
  const auto skip = std::find_if(program->edges().begin(), program->edges().end(),
                                 [](const Edge& edge) { return edge.name == "skip a"; });
  ASSERT_NE(skip, program->edges().end());
  EXPECT_EQ(skip->from, 0);
  EXPECT_EQ(skip->to, 3);
  EXPECT_EQ(program->edges().size(), 4U);
  GPipe together(model, std::vector<std::int64_t>{4});
  EXPECT_TRUE(together->program(2)->edges().empty()) << "a skip inside a stage is no edge";
}

TEST(SkipEdgesTest, ThePlainModelAndThePipelineAgree) {
  auto model = skip_model();
  model->to(torch::kFloat64);
  model->eval();
  const auto x = torch::randn({5, 6}, torch::kFloat64).requires_grad_();
  const auto expected = torch::autograd::grad({model->forward(x).sum()}, {x})[0];
  for (const auto checkpoint : kModes) {
    GPipe pipe(model, std::vector<std::int64_t>{2, 2, 2, 2, 2}, GPipeOptions().chunks(2).checkpoint(checkpoint));
    EXPECT_TRUE(torch::allclose(torch::autograd::grad({pipe->forward(x).sum()}, {x})[0], expected, 1e-10, 1e-12));
  }
}

TEST(SkipEdgesTest, NestedLayersAndNamespacesCross) {
  const auto block = [](Namespace ns) {
    NestedSequential encode{{"linear", Linear(6, 6)}, {"stash", Stash("a")}};
    NestedSequential decode{{"linear", Linear(6, 6)}, {"pop", Pop("a")}};
    isolate(*encode, ns);
    isolate(*decode, ns);
    return std::pair(encode, decode);
  };
  auto [outer_encode, outer_decode] = block(Namespace());
  auto [inner_encode, inner_decode] = block(Namespace());
  auto model = Sequential(outer_encode, inner_encode, Linear(6, 6), inner_decode, outer_decode);
  model->to(torch::kFloat64);
  const auto x = torch::randn({4, 6}, torch::kFloat64).requires_grad_();
  const auto expected = torch::autograd::grad({model->forward(x).sum()}, {x})[0];
  GPipe pipe(model, std::vector<std::int64_t>{1, 1, 1, 1, 1}, GPipeOptions().chunks(2));
  EXPECT_EQ(pipe->program(1)->edges().size(), 6U);
  EXPECT_TRUE(torch::allclose(torch::autograd::grad({pipe->forward(x).sum()}, {x})[0], expected));
}

TEST(SkipEdgesTest, MismatchesAreFoundWhenAPipelineIsMade) {
  EXPECT_THROW(GPipe(Sequential(Stash("a"), Linear(2, 2)), std::vector<std::int64_t>{1, 1}), std::invalid_argument);
  EXPECT_THROW(GPipe(Sequential(Pop("a"), Stash("a")), std::vector<std::int64_t>{1, 1}), std::invalid_argument);
}

TEST(SkipEdgesTest, WhatALayerDeclaresItMustDo) {
  const auto pop_and_add = [](LambdaImpl& self, Tensor x) { return x + self.pop("s"); };
  const auto run = [&](Lambda first, Lambda second, std::vector<std::int64_t> balance) {
    GPipe pipe(Sequential(first, second), balance, GPipeOptions().chunks(2));
    pipe->forward(torch::randn({4, 6}));
  };
  for (const auto& balance : {std::vector<std::int64_t>{1, 1}, std::vector<std::int64_t>{2}}) {
    EXPECT_THAT([&] { run(stashing([](auto&, Tensor x) { return x; }), popping(pop_and_add), balance); },
                ThrowsMessage<std::runtime_error>(HasSubstr("'s'")));
    EXPECT_THAT(
        [&] {
          run(stashing([](LambdaImpl& self, Tensor x) {
                self.stash("s", x);
                self.stash("s", x);
                return x;
              }),
              popping(pop_and_add), balance);
        },
        ThrowsMessage<std::runtime_error>(HasSubstr("twice")));
    EXPECT_THAT(
        [&] {
          run(stashing([](LambdaImpl& self, Tensor x) {
                self.stash("s", x);
                return x * 2;
              }),
              popping([](auto&, Tensor x) { return x; }), balance);
        },
        ThrowsMessage<std::runtime_error>(HasSubstr("to be popped")));
  }
}

TEST(SkipEdgesTest, AStashChangedInPlaceOnItsWayIsAnError) {
  auto model = Sequential(Linear(6, 6), stashing([](LambdaImpl& self, Tensor x) {
                            self.stash("s", x);
                            return x;
                          }),
                          torch::nn::ReLU(torch::nn::ReLUOptions(true)),
                          popping([](LambdaImpl& self, Tensor x) { return x + self.pop("s"); }));
  for (const auto& balance :
       {std::vector<std::int64_t>{2, 1, 1}, std::vector<std::int64_t>{3, 1}, std::vector<std::int64_t>{2, 2}}) {
    GPipe pipe(model, balance, GPipeOptions().chunks(2));
    EXPECT_THAT(
        [&] {
          pipe->forward(torch::randn({4, 6}));
        },
        ThrowsMessage<std::runtime_error>(HasSubstr("changed in place by layer '2'")));
  }
}

// Micro-batches are views of one tensor; a change of one is no change of another.
TEST(SkipEdgesTest, InPlaceAtTheHeadOfTheModel) {
  const auto relu = [] { return torch::nn::ReLU(torch::nn::ReLUOptions(true)); };
  auto linear = Linear(6, 6);
  for (const auto checkpoint : kModes) {
    const auto options = GPipeOptions().chunks(3).checkpoint(checkpoint);
    for (int step = 0; step < 2; ++step) {
      GPipe head(Sequential(relu(), linear), {2}, options);
      head->forward(torch::randn({6, 6})).sum().backward();
      GPipe alone(Sequential(relu(), linear), {1, 1}, options);
      alone->forward(torch::randn({6, 6})).sum().backward();
      GPipe flat(Sequential(torch::nn::Flatten(), relu(), linear), {1, 2}, options);
      flat->forward(torch::randn({6, 2, 3})).sum().backward();
      GPipe skip(Sequential(relu(), Stash("a"), linear, Pop("a")), {3, 1}, options);
      skip->forward(torch::randn({6, 6})).sum().backward();
    }
    GPipe pipe(Sequential(linear), {1}, options);
    auto x = torch::randn({6, 6});
    const auto loss = pipe->forward(x).sum();
    x.zero_();
    EXPECT_ANY_THROW(loss.backward());
  }
}

TEST(SkipEdgesTest, AStageThatChangesItsInputIsRecomputedTwiceFromTheSameInput) {
  auto model = Sequential(Linear(6, 6), torch::nn::Functional([](Tensor x) { return x.mul_(3); }), torch::nn::Tanh(),
                          Linear(6, 6));
  for (const auto& balance : {std::vector<std::int64_t>{1, 3}, std::vector<std::int64_t>{1, 1, 1, 1}}) {
    GPipe pipe(model, balance, GPipeOptions().chunks(2).checkpoint(Checkpoint::kAlways));
    const auto x = torch::randn({4, 6}).requires_grad_();
    const auto loss = pipe->forward(x).square().sum();
    const auto first = torch::autograd::grad({loss}, {x}, {}, /*retain_graph=*/true)[0];
    const auto second = torch::autograd::grad({loss}, {x})[0];
    EXPECT_TRUE(torch::equal(first, second));
  }
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

TEST(SkipEdgesTest, InPlaceOperationsWithAParameter) {
  for (const bool view : {false, true}) {
    InPlaceParameter layer(view);
    const auto x = torch::ones({4, 6});
    layer->forward(x.clone()).sum().backward();
    const auto expected = layer->weight.grad().clone();
    for (const auto checkpoint : kModes) {
      layer->zero_grad();
      GPipe pipe(Sequential(layer, torch::nn::Identity()), {1, 1}, GPipeOptions().chunks(2).checkpoint(checkpoint));
      pipe->forward(x.clone()).sum().backward();
      ASSERT_TRUE(layer->weight.grad().defined());
      EXPECT_TRUE(torch::equal(layer->weight.grad(), expected));
    }
  }
}

TEST(SkipEdgesTest, AStageThatSuddenlyChangesItsInputIsRecomputedFromACopyNextTime) {
  bool in_place = false;
  auto model =
      Sequential(Linear(6, 6), torch::nn::Functional([&in_place](Tensor x) { return in_place ? x.mul_(2) : x * 2; }),
                 Linear(6, 6));
  GPipe pipe(model, std::vector<std::int64_t>{1, 2}, GPipeOptions().chunks(2).checkpoint(Checkpoint::kAlways));
  const auto x = torch::randn({4, 6}).requires_grad_();
  const auto gradient = [&] { return torch::autograd::grad({pipe->forward(x).sum()}, {x})[0]; };
  const auto expected = gradient();
  in_place = true;
  EXPECT_THAT(gradient, ThrowsMessage<std::runtime_error>(HasSubstr("in place")));
  EXPECT_TRUE(torch::equal(gradient(), expected));
}

}  // namespace
}  // namespace gpipe
