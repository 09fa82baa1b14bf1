// Skips across stages: their edges, their gradients, and their errors.
#include "tests/gpipe/layers.h"

namespace gpipe {
namespace {

TEST(SkipEdges, SumGradientsAsWithoutStagesIfEachWorkerHasOneStage) {
  torch::manual_seed(0);
  auto model = Sequential(Linear(6, 6), Stash("s"), Linear(6, 6));
  for (int i = 0; i < 6; ++i) {
    model->push_back(Peek("s"));
    model->push_back(Linear(6, 6));
  }
  model->push_back(Pop("s"));
  const auto x = torch::randn({4, 6}).requires_grad_();
  const auto expected = gradient_of(GPipe(model, {16}, in_chunks(1))->forward(x).sin().sum(), x);
  for (const auto& balance : {Balance{1, 15}, Balance{5, 11}, Balance{3, 5, 4, 4}, Balance{2, 2, 2, 2, 2, 2, 2, 2}}) {
    GPipe pipe(model, balance, in_chunks(1));
    EXPECT_TRUE(torch::equal(gradient_of(pipe->forward(x).sin().sum(), x), expected)) << balance;
  }
}

TEST(SkipEdges, RefuseAChangeInPlaceByAReaderThatIsNotTheLast) {
  const SkipFunction changes(Skippable::Names{.peek = {"s"}},
                             [](Tensor x, SkipFunctionImpl& self) { return x + self.peek("s").mul_(2); });
  const Sequential model(Linear(6, 6), Stash("s"), changes, Pop("s"));
  for (const auto& balance : {Balance{2, 1, 1}, Balance{2, 2}}) {
    for (const auto& placement : {std::vector<int>(), std::vector<int>(balance.size())}) {
      GPipe pipe(model, balance, in_chunks(2).placement(placement));
      EXPECT_THAT([&] { pipe->forward(torch::randn({4, 6})); }, throws<std::runtime_error>("changed in place"));
    }
  }
}

TEST(SkipEdges, AreErrorsWhenALayerBreaksItsDeclaration) {
  using Names = Skippable::Names;
  const SkipFunction nothing_stashed(Names{.stash = {"s"}}, [](Tensor x, SkipFunctionImpl&) { return x; });
  const SkipFunction nothing_popped(Names{.pop = {"s"}}, [](Tensor x, SkipFunctionImpl&) { return x; });
  const SkipFunction stashed_twice(Names{.stash = {"s"}}, [](Tensor x, SkipFunctionImpl& self) {
    self.stash("s", x);
    self.stash("s", x);
    return x;
  });
  const SkipFunction popped_twice(Names{.pop = {"s"}}, [](const Tensor& x, SkipFunctionImpl& self) {
    self.pop("s");
    return x + self.pop("s");
  });
  for (const auto& balance : {Balance{1, 1}, Balance{2}}) {
    const auto run = [&](auto first, auto second) {
      return [=] { GPipe(Sequential(first, second), balance, in_chunks(2))->forward(torch::randn({4, 6})); };
    };
    EXPECT_THAT(run(nothing_stashed, Pop("s")), throws<std::runtime_error>("'s'"));
    EXPECT_THAT(run(stashed_twice, Pop("s")), throws<std::runtime_error>("was stashed twice"));
    EXPECT_THAT(run(Stash("s"), popped_twice), throws<std::runtime_error>("was read twice"));
    EXPECT_THAT(run(Stash("s"), nothing_popped), throws<std::runtime_error>("to be read"));
  }
}

TEST(SkipEdges, AreErrorsWhenTheStashIsChangedInPlaceOnItsWay) {
  const Sequential model(Linear(6, 6), Stash("s", 1), torch::nn::ReLU(torch::nn::ReLUOptions(true)), Pop("s"));
  const auto x = torch::randn({4, 6});
  for (const auto& balance : {Balance{2, 1, 1}, Balance{3, 1}, Balance{2, 2}}) {
    GPipe pipe(model, balance, in_chunks(2));
    EXPECT_THAT([&] { pipe->forward(x); }, throws<std::runtime_error>("changed in place by layer '2'"));
  }
}

}  // namespace
}  // namespace gpipe
