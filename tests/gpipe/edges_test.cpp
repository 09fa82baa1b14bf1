// What crosses stages beside the activation: skips, and parameters that layers of several stages share. The generated
// cases have both.
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

TEST(SkipEdges, RefuseChangesInPlaceAndLayersThatBreakTheirDeclarations) {
  using Names = Skippable::Names;
  const auto layer = [](Names names, SkipFunctionImpl::Function function) { return SkipFunction(names, function); };
  const auto nothing = [](Tensor x, SkipFunctionImpl&) { return x; };
  const auto change = [](Tensor x, SkipFunctionImpl& self) { return x + self.peek("s").mul_(2); };
  const auto stash_twice = [](Tensor x, SkipFunctionImpl& self) {
    self.stash("s", x);
    self.stash("s", x);
    return x;
  };
  const auto pop_twice = [](const Tensor& x, SkipFunctionImpl& self) {
    self.pop("s");
    return x + self.pop("s");
  };
  const torch::nn::ReLU relu(torch::nn::ReLUOptions(true));
  const std::tuple<Sequential, std::vector<Balance>, std::string> cases[] = {
      {Sequential(Stash("s"), layer({.peek = {"s"}}, change), Pop("s")), {{1, 1, 1}, {1, 2}}, "changed in place"},
      {Sequential(Stash("s", 1), relu, Pop("s")), {{1, 1, 1}, {2, 1}, {1, 2}}, "changed in place by layer '1'"},
      {Sequential(layer({.stash = {"s"}}, nothing), Pop("s")), {{1, 1}, {2}}, "'s'"},
      {Sequential(layer({.stash = {"s"}}, stash_twice), Pop("s")), {{1, 1}, {2}}, "was stashed twice"},
      {Sequential(Stash("s"), layer({.pop = {"s"}}, pop_twice)), {{1, 1}, {2}}, "was read twice"},
      {Sequential(Stash("s"), layer({.pop = {"s"}}, nothing)), {{1, 1}, {2}}, "to be read"}};
  for (const auto& [model, balances, why] : cases) {
    for (const auto& balance : balances) {
      for (const auto& placement : {std::vector<int>(), std::vector<int>(balance.size())}) {
        GPipe pipe(model, balance, in_chunks(2).placement(placement));
        EXPECT_THAT([&] { pipe->forward(torch::randn({4, 6})); }, throws<std::runtime_error>(why)) << balance;
      }
    }
  }
}

namespace nn = torch::nn;

// Wide enough for products to be split, and in single precision. A stage sums the gradients of its own layers first.
TEST(TiedParameters, HaveTheBitsOfWholeBackwardsAndOfOneStage) {
  const auto run = [](const Balance& balance, const std::string& schedule) {
    GPipe pipe(tied_model(torch::kFloat32, 128), balance,
               in_chunks(4, Checkpoint::kNever).schedule(schedule).intraop_threads(1));
    std::vector<Tensor> results;
    for (int i = 0; i < 2; ++i) {
      const auto x = words_of(8).roll(i);
      results.push_back(pipe->step(x, next_words(x), kCrossEntropy).loss);
    }
    for (const auto& parameter : pipe->parameters()) results.push_back(parameter.grad());
    return results;
  };
  const auto expected = run({7}, "1f1b");
  EXPECT_TRUE(same(run({1, 6}, "zb_h1"), expected));
  EXPECT_TRUE(same(run({3, 4}, "zb_h2"), expected));
  EXPECT_TRUE(same(run({1, 3, 3}, "zb_h1"), run({1, 3, 3}, "1f1b")));
}

TEST(TiedParameters, GoAlongOneEdgePerStage) {
  const auto readers = [](const Balance& balance) {
    std::vector<int> found;
    const auto program = GPipe(tied_model(), balance)->program(2);
    for (const auto& edge : program->edges()) {
      if (edge.name == "parameter 0.weight") found.push_back(edge.to);
    }
    return found;
  };
  EXPECT_THAT(readers({7}), IsEmpty());
  EXPECT_THAT(readers({3, 4}), ElementsAre(1));
  EXPECT_THAT(readers({1, 6}), ElementsAre(1)) << "one edge for both layers of a stage";
  EXPECT_THAT(readers({1, 1, 1, 4}), ElementsAre(2, 3));
}

TEST(TiedParameters, RunTheirHooksOnce) {
  auto model = tied_model();
  int calls = 0;
  model->parameters()[0].register_hook([&](const Tensor&) { ++calls; });
  GPipe(model, {1, 3, 3}, in_chunks(3))->forward(words_of(8)).square().sum().backward();
  EXPECT_EQ(calls, 1);
}

TEST(TiedParameters, MayNotBeWrittenToByALayer) {
  const auto writes = [](const Tensor& x, Tensor weight) {
    const torch::NoGradGuard no_grad;
    weight.mul_(0.5);
    return x.clone();
  };
  for (const int layer : {2, 6}) {
    for (const auto checkpoint : kModes) {
      auto model = tied_model();
      model->at<SharerImpl>(layer).function = writes;
      GPipe pipe(model, {3, 4}, in_chunks(2, checkpoint));
      EXPECT_THAT([&] { pipe->forward(words_of(8)); }, throws<std::runtime_error>("wrote to a parameter"));
      if (checkpoint != Checkpoint::kNever) continue;
      GPipe together(model, {7}, in_chunks(2, checkpoint));
      EXPECT_NO_THROW(together->forward(words_of(8)));
    }
  }
}

TEST(TiedParameters, StayTiedInTheStateOfTheModelAtAnyBalance) {
  const auto trained = tied_model();
  for (const auto& balance : {Balance{7}, Balance{1, 3, 3}}) {
    GPipe pipe(tied_model(), balance);
    const nn::Module& state = *pipe;
    for (auto& parameter : state.parameters()) parameter.detach().zero_();
    std::stringstream file;
    torch::save(trained, file);
    torch::load(pipe, file);
    EXPECT_EQ(state.named_parameters().keys(), trained->named_parameters().keys());
    EXPECT_TRUE(same(state.parameters(), trained->parameters()));
    EXPECT_EQ(pipe->parameters().size(), distinct_parameters(*trained).size());
    EXPECT_TRUE(state.named_parameters()["0.weight"].is_same(state.named_parameters()["6.weight"]));
    std::stringstream of_pipeline;
    torch::save(pipe, of_pipeline);
    auto loaded = tied_model();
    torch::load(loaded, of_pipeline);
    EXPECT_TRUE(same(loaded->parameters(), trained->parameters()));
  }
}

TEST(TiedParameters, MayNotBeTakenFromTheirLayer) {
  const auto first = std::make_shared<Outer<Linear>>(Linear(6, 6));
  GPipe pipe(Sequential(first, Sharer(first->inner->weight, mix)), {1, 1});
  pipe->forward(torch::ones({4, 6}));
  first->unregister_module("inner");
  EXPECT_FALSE(pipe->ties_unchanged());
  EXPECT_THAT([&] { pipe->forward(torch::ones({4, 6})); }, throws<std::runtime_error>("'0.inner.weight'"));
}

TEST(TiedParameters, TakeNoMemoryOnOneDevice) {
  const auto big = torch::ones({1 << 20}).requires_grad_();
  const auto scale = [](const Tensor& x, const Tensor& weight) { return x * weight[0]; };
  GPipe pipe(Sequential(Sharer(big, scale), Sharer(big, scale)), {1, 1}, in_chunks(3, Checkpoint::kAlways));
  const auto timeline = std::make_shared<Timeline>();
  pipe->trace(timeline);
  pipe->forward(torch::ones({6, 4}));
  EXPECT_THAT(timeline->peak_bytes(), testing::Each(testing::AllOf(testing::Gt(0), testing::Lt(1 << 20))));
  ASSERT_EQ(timeline->edges.size(), 2U);
  EXPECT_EQ(timeline->edges[1].name, "parameter 0.weight");
}

}  // namespace
}  // namespace gpipe
