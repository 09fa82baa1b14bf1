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
  const auto edges = [](const Balance& balance) {
    std::vector<std::string> found;
    const auto program = GPipe(tied_model(), balance)->program(2);
    for (const auto& edge : program->edges()) {
      if (edge.name == "activation") continue;
      found.push_back(edge.name + " " + std::to_string(edge.from) + ">" + std::to_string(edge.to));
    }
    return found;
  };
  using Names = std::vector<std::string>;
  EXPECT_EQ(edges({7}), Names());
  EXPECT_EQ(edges({3, 4}), Names({"parameter 0.weight 0>1"}));
  EXPECT_EQ(edges({1, 6}), Names({"parameter 0.weight 0>1"})) << "one edge for both layers of a stage";
  EXPECT_EQ(edges({1, 1, 1, 4}), Names({"parameter 0.weight 0>2", "parameter 0.weight 0>3"}));
}

TEST(TiedParameters, HaveOneGradientAndRunTheirHooksOnce) {
  auto whole = tied_model();
  const auto x = words_of(8);
  const auto expected = gradient_of(whole->forward(x).square().sum(), whole->parameters()[0]);
  auto model = tied_model();
  GPipe pipe(model, {1, 3, 3}, in_chunks(3));
  int calls = 0;
  model->parameters()[0].register_hook([&](const Tensor& gradient) {
    ++calls;
    EXPECT_TRUE(torch::allclose(gradient, expected));
  });
  pipe->forward(x).square().sum().backward();
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
  const auto load = [](const auto& from, auto to) {
    for (auto& parameter : to->parameters()) parameter.detach().zero_();
    std::stringstream file;
    torch::save(from, file);
    torch::load(to, file);
  };
  const auto trained = tied_model();
  for (const auto& balance : {Balance{7}, Balance{1, 3, 3}}) {
    GPipe pipe(tied_model(), balance);
    const nn::Module& state = *pipe;
    load(trained, pipe);
    EXPECT_EQ(state.named_parameters().keys(), trained->named_parameters().keys());
    EXPECT_TRUE(same(state.parameters(), trained->parameters()));
    EXPECT_EQ(pipe->parameters().size(), distinct_parameters(*trained).size());
    EXPECT_TRUE(state.named_parameters()["0.weight"].is_same(state.named_parameters()["6.weight"]));
    auto loaded = tied_model();
    load(pipe, loaded);
    EXPECT_TRUE(same(loaded->parameters(), trained->parameters()));
  }
}

TEST(TiedParameters, MayNotBeTakenFromTheirLayer) {
  struct OuterImpl : nn::Module {
    explicit OuterImpl(Linear linear) : inner(register_module("inner", linear)) {}
    Tensor forward(const Tensor& x) { return inner->forward(x); }
    void unregister() { unregister_module("inner"); }
    Linear inner;
  };
  const auto first = std::make_shared<OuterImpl>(Linear(6, 6));
  GPipe pipe(Sequential(first, Sharer(first->inner->weight, mix)), {1, 1});
  pipe->forward(torch::ones({4, 6}));
  first->unregister();
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
