// Skips across stages: their edges, their gradients, and their errors.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <functional>
#include <utility>

#include "gpipe/schedule/program.h"
#include "tests/gpipe/helpers.h"
#include "tests/gpipe/layers.h"

namespace gpipe {
namespace {

SkipFunction stashing(SkipFunctionImpl::Function function) {
  return SkipFunction(Skippable::Names{.stash = {"s"}}, std::move(function));
}
SkipFunction popping(SkipFunctionImpl::Function function) {
  return SkipFunction(Skippable::Names{.pop = {"s"}}, std::move(function));
}

TEST(SkipEdges, GoStraightFromStashToPop) {
  auto model = Sequential(Stash("a"), Linear(6, 6), Linear(6, 6), Pop("a"));
  GPipe pipe(model, {1, 1, 1, 1});
  const auto program = pipe->program(2);
  const auto skip = std::find_if(program->edges().begin(), program->edges().end(),
                                 [](const Edge& edge) { return edge.name == "skip a"; });
  ASSERT_NE(skip, program->edges().end());
  EXPECT_EQ(skip->from, 0);
  EXPECT_EQ(skip->to, 3);
  EXPECT_EQ(program->edges().size(), 4U);
  GPipe together(model, {4});
  EXPECT_TRUE(together->program(2)->edges().empty()) << "a skip inside a stage is not an edge";
}

TEST(SkipEdges, JoinNestedLayersAndKeepNamespacesApart) {
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
  GPipe pipe(model, {1, 1, 1, 1, 1}, GPipeOptions().chunks(2));
  EXPECT_EQ(pipe->program(1)->edges().size(), 6U);
  EXPECT_TRUE(torch::allclose(torch::autograd::grad({pipe->forward(x).sum()}, {x})[0], expected));
}

TEST(SkipEdges, AreErrorsWhenALayerBreaksItsDeclaration) {
  const auto pop_and_add = [](Tensor x, SkipFunctionImpl& self) { return x + self.pop("s"); };
  const auto nothing = [](Tensor x, SkipFunctionImpl&) { return x; };
  const auto stash_twice = [](Tensor x, SkipFunctionImpl& self) {
    self.stash("s", x);
    self.stash("s", x);
    return x;
  };
  const auto stash_once = [](Tensor x, SkipFunctionImpl& self) {
    self.stash("s", x);
    return x * 2;
  };
  for (const auto& balance : {Balance{1, 1}, Balance{2}}) {
    const auto run = [&](SkipFunction first, SkipFunction second) {
      GPipe pipe(Sequential(first, second), balance, GPipeOptions().chunks(2));
      pipe->forward(torch::randn({4, 6}));
    };
    EXPECT_THAT([&] { run(stashing(nothing), popping(pop_and_add)); }, throws<std::runtime_error>("'s'"));
    EXPECT_THAT([&] { run(stashing(stash_twice), popping(pop_and_add)); }, throws<std::runtime_error>("twice"));
    EXPECT_THAT([&] { run(stashing(stash_once), popping(nothing)); }, throws<std::runtime_error>("to be popped"));
  }
}

TEST(SkipEdges, AreErrorsWhenTheStashIsChangedInPlaceOnItsWay) {
  auto model = Sequential(Linear(6, 6), stashing([](Tensor x, SkipFunctionImpl& self) {
                            self.stash("s", x);
                            return x;
                          }),
                          torch::nn::ReLU(torch::nn::ReLUOptions(true)),
                          popping([](Tensor x, SkipFunctionImpl& self) { return x + self.pop("s"); }));
  const auto x = torch::randn({4, 6});
  for (const auto& balance : {Balance{2, 1, 1}, Balance{3, 1}, Balance{2, 2}}) {
    GPipe pipe(model, balance, GPipeOptions().chunks(2));
    EXPECT_THAT([&] { pipe->forward(x); }, throws<std::runtime_error>("changed in place by layer '2'"));
  }
}

}  // namespace
}  // namespace gpipe
