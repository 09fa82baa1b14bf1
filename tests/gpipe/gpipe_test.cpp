// The container: modes, calls, the forms of inputs and outputs, state, random numbers, traces and micro-batches.
#include "gpipe/run/step_input.h"
#include "tests/gpipe/layers.h"

namespace gpipe {
namespace {

namespace nn = torch::nn;

TEST(GPipe, TakesChunksAndCheckpointModeForOneCallAlsoInEvalMode) {
  using Seen = std::vector<std::pair<std::int64_t, bool>>;
  Seen seen;
  Sequential model(Functional([&](Tensor x) {
    if (!is_recomputing()) seen.emplace_back(x.size(0), is_checkpointing());
    return x * 1;
  }));
  const Value x(torch::randn({4, 4}).requires_grad_());
  for (const bool training : {true, false}) {
    for (auto options : {in_chunks(4), GPipeOptions().split_size(1)}) {
      GPipe pipe(model, {1}, options.checkpoint(Checkpoint::kAlways));
      pipe->train(training);
      pipe->forward(x).tensor().sum().backward();
      EXPECT_EQ(std::exchange(seen, {}), Seen(4, {1, training})) << "in eval mode nothing is recomputed";
      pipe->forward(x, 2, Checkpoint::kExceptLast).tensor().sum().backward();
      EXPECT_EQ(std::exchange(seen, {}), (Seen{{2, true}, {2, false}}));
      EXPECT_THROW(pipe->forward(x, 0, Checkpoint::kNever), std::invalid_argument);
    }
  }
}

TEST(GPipe, RunsBackwardsInAnyOrder) {
  auto model = mlp();
  GPipe pipe(model, {1, 3}, in_chunks(2, Checkpoint::kAlways));
  const auto a = torch::randn({4, 6}).requires_grad_();
  const auto b = torch::randn({6, 6}).requires_grad_();
  const auto of_a = pipe->forward(a);
  const auto of_b = pipe->forward(b);
  { const auto dropped = pipe->forward(a); }
  const auto first_a = gradient_of(of_a.sum(), a);
  const auto first_b = gradient_of(of_b.sum(), b);
  EXPECT_TRUE(same(gradient_of(pipe->forward(b).sum(), b), first_b));
  EXPECT_TRUE(same(gradient_of(pipe->forward(a).sum(), a), first_a));
}

TEST(GPipe, RunsASecondBackwardOfRetainedGraphsOnlyAndNoneOfABackward) {
  for (const auto checkpoint : kModes) {
    GPipe pipe(mlp(), {2, 2}, in_chunks(3, checkpoint));
    const auto x = torch::randn({6, 6}).requires_grad_();
    const auto loss = pipe->forward(x).sum();
    const auto first = gradient_of(loss, x, /*retain_graph=*/true);
    EXPECT_TRUE(same(first, gradient_of(loss, x)));
    EXPECT_THROW(gradient_of(loss, x), c10::Error);
    const auto other = pipe->forward(x).sum();
    EXPECT_THROW(torch::autograd::grad({other}, {x}, {}, true, /*create_graph=*/true), c10::NotImplementedError);
  }
}

TEST(GPipe, IsIdleWhileNoGraphNeedsIt) {
  GPipe pipe(mlp(), {2, 2}, in_chunks(2));
  EXPECT_TRUE(pipe->idle());
  {
    const auto output = pipe->forward(torch::randn({4, 6}));
    EXPECT_FALSE(pipe->idle());
  }
  EXPECT_TRUE(pipe->idle()) << "the graph was dropped";
  const auto loss = pipe->forward(torch::randn({4, 6})).sum();
  loss.backward();
  EXPECT_TRUE(pipe->idle()) << "the graph was used";
}

TEST(GPipe, UsesTheDevicesThatItsStagesNeed) {
  const auto made = [](const std::string& schedule, const Balance& balance, std::size_t devices) {
    const auto given = std::vector<torch::Device>(devices, torch::kCPU);
    return GPipe(mlp(), balance, GPipeOptions().schedule(schedule).devices(given));
  };
  EXPECT_EQ(made("gpipe", {2, 2}, 3)->devices().size(), 2U);
  for (const auto* schedule : {"looped_bfs", "interleaved_1f1b", "interleaved_zb"}) {
    EXPECT_EQ(made(schedule, {1, 1, 1, 1}, 2)->placement(), (std::vector<int>{0, 1, 0, 1})) << schedule;
  }
  EXPECT_EQ(made("looped_bfs", {1, 1, 1, 1}, 4)->placement(), (std::vector<int>{0, 1, 2, 3}));
  EXPECT_THAT([&] { made("gpipe", {1, 1, 1, 1}, 2); }, throws<std::out_of_range>("4 workers, but 2 devices"));
}

struct Warnings : c10::WarningHandler {
  void process(const c10::Warning& warning) override { texts.push_back(warning.msg()); }
  std::vector<std::string> texts;
};

TEST(GPipe, WarnsOnceThatAForwardFillsAndDrains) {
  GPipe pipe(mlp(), {2, 2}, GPipeOptions().schedule("1f1b"));
  Warnings warnings;
  const c10::WarningUtils::WarningHandlerGuard guard(&warnings);
  for (int i = 0; i < 2; ++i) pipe->forward(torch::randn({4, 6}));
  EXPECT_THAT(warnings.texts, ::testing::ElementsAre(::testing::HasSubstr("only step() has the schedule '1f1b'")));
}

TEST(GPipe, IsCalledAndHeldAsOtherModules) {
  GPipe pipe(mlp(), {2, 2}, in_chunks(2));
  const auto x = torch::randn({4, 6});
  const auto expected = pipe->forward(x);
  EXPECT_TRUE(same(pipe(x), expected));
  EXPECT_TRUE(same(pipe(Value(x)).tensor(), expected));
  EXPECT_TRUE(same(nn::AnyModule(pipe).forward(x), expected));
  nn::Sequential outer(pipe, nn::ReLU());
  EXPECT_TRUE(same(outer->forward(x), expected.relu()));
  EXPECT_EQ(outer->parameters().size(), pipe->parameters().size());
  GPipe sum(Sequential(function_layer([](std::vector<Tensor> in) { return in[0] + in[1]; })), {1}, in_chunks(2));
  EXPECT_TRUE(same(sum->forward(std::vector<Tensor>{x, x}), std::vector<Tensor>{x + x}));
  GPipe pairs(Sequential(function_layer([](Tensor in) { return std::make_tuple(in, in * 2); })), {1});
  EXPECT_THAT([&] { pairs->forward(x); }, refused("expected a single tensor"));
}

TEST(State, ConvertsToAnotherTypeAndStaysOnItsDevices) {
  GPipe pipe(Sequential(Linear(6, 6), Linear(6, 6)), {1, 1});
  EXPECT_THROW(pipe->to(torch::kCPU), c10::TypeError);
  EXPECT_THROW(pipe->to(torch::kCPU, torch::kFloat64), c10::TypeError);
  pipe->to(torch::kFloat64);
  EXPECT_EQ(pipe->forward(torch::zeros({4, 6}, torch::kFloat64)).scalar_type(), torch::kFloat64);
}

TEST(State, OfAnotherModelIsRefusedAndChangesNothing) {
  const auto build = [](int width, torch::Dtype dtype) {
    Sequential model(Linear(6, 6), nn::BatchNorm1d(6), Linear(6, width));
    model->to(dtype);
    return model;
  };
  GPipe pipe(build(5, torch::kFloat32), {2, 1});
  const nn::Module& state = *pipe;
  const auto before = copies(state.parameters());
  const auto load = [&](int width, torch::Dtype dtype) {
    std::stringstream file;
    torch::save(build(width, dtype), file);
    torch::load(pipe, file);
  };
  EXPECT_THAT([&] { load(7, torch::kFloat32); },
              throws<std::invalid_argument>("'2.weight' is Float[7, 6] in the file and Float[5, 6] in this model"));
  EXPECT_THAT([&] { load(5, torch::kFloat64); }, throws<std::invalid_argument>("'0.weight' is Double[6, 6] in the"));
  EXPECT_TRUE(same(state.parameters(), before));
  load(5, torch::kFloat32);
  EXPECT_FALSE(same(state.parameters(), before));
}

// With split_size, mini-batches of many sizes need many programs.
TEST(Pipeline, KeepsTheSixteenProgramsUsedLast) {
  GPipe pipe(Sequential(nn::Identity(), nn::Identity()), {1, 1});
  const std::weak_ptr<const Program> often = pipe->program(1);
  std::vector<std::weak_ptr<const Program>> others;
  for (int micro_batches = 2; micro_batches < 40; ++micro_batches) {
    others.push_back(pipe->program(micro_batches));
    EXPECT_EQ(pipe->program(1), often.lock());
  }
  EXPECT_EQ(std::count_if(others.begin(), others.end(), [](const auto& each) { return !each.expired(); }), 15);
  EXPECT_EQ(pipe->program(39), others.back().lock());
  EXPECT_EQ(pipe->program(2)->layout().micro_batches, 2);
}

using Sizes = std::vector<std::int64_t>;

TEST(MicroBatch, SizesAreAsEqualAsCanBeAndAtLeastTwoForBatchNorm) {
  constexpr auto kHuge = std::numeric_limits<std::int64_t>::max();
  struct Case {
    std::int64_t samples, chunks, split_size, least;
    Sizes sizes;
  };
  for (const auto& [samples, chunks, split_size, least, sizes] : std::vector<Case>{
           {10, 4, 0, 1, {3, 3, 2, 2}},
           {2, 5, 0, 1, {1, 1}},
           {0, 5, 0, 1, {0}},
           {0, 1, 4, 1, {0}},
           {10, 1, 4, 1, {4, 4, 2}},
           {kHuge, 2, 0, 1, {kHuge / 2 + 1, kHuge / 2}},
           {kHuge, 1, kHuge, 1, {kHuge}},
           {9, 1, 4, 2, {3, 3, 3}},
           {10, 1, 4, 2, {4, 4, 2}},
           {5, 8, 0, 2, {3, 2}},
           {1, 8, 0, 2, {1}},
           {3, 1, 1, 2, {1, 1, 1}},  // a size of 1 was asked for
       }) {
    EXPECT_EQ(micro_batch_sizes(samples, chunks, split_size, least), sizes) << samples << " samples";
  }
  EXPECT_THAT([] { micro_batch_sizes(4, 0, 0); }, refused("chunks must be positive, but is 0"));
  EXPECT_THAT([] { micro_batch_sizes(4, 1, -2); }, refused("micro-batches of -2 samples"));
  EXPECT_THAT([] { micro_batch_sizes(-4, 1, 0); }, refused("a mini-batch of -4 samples"));
}

TEST(MicroBatch, OutputsWhoseDimensionZeroIsNotTheBatchAreNamed) {
  using Tensors = std::vector<Tensor>;
  const auto refusal = [](std::function<Tensors(Tensor)> last) {
    auto norm = nn::BatchNorm1d(6);
    GPipe pipe(Sequential(norm, function_layer(last)), {1, 1}, in_chunks(2));
    const auto x = torch::randn({7, 6});
    const auto state = generator_state();
    const auto text = error_of([&] { pipe->forward(Value(x)); });
    if (text.empty()) return text;
    EXPECT_FALSE(pipe->last_error()) << "no action failed";
    EXPECT_EQ(norm->num_batches_tracked.item<std::int64_t>(), 0);
    EXPECT_TRUE(same(generator_state(), state));
    return text;
  };
  EXPECT_THAT(refusal([](const Tensor& x) {
                return Tensors{x, torch::zeros({2, x.size(0), 4})};
              }),
              HasSubstr("output 1 of layer '1' has the shape [2, 4, 4] for a micro-batch of 4"));
  EXPECT_THAT(refusal([](const Tensor& x) {
                return Tensors{torch::zeros({x.size(0), x.size(0) - 1})};
              }),
              HasSubstr("'1' has the shape [4, 3] for one micro-batch and [3, 2] for another"));
  EXPECT_THAT(refusal([](const Tensor& x) { return Tensors{x.sum()}; }), HasSubstr("cannot be joined"));
  EXPECT_EQ(refusal([](const Tensor& x) { return Tensors{x, x}; }), "");
}

TEST(MicroBatch, PartsAreViewsWithTheirOwnVersionCounters) {
  const auto whole = torch::arange(6).view({3, 2});
  const auto parts = scatter(whole, {2, 1});
  ASSERT_EQ(parts.size(), 2U);
  EXPECT_TRUE(torch::equal(parts[0].tensors[0], whole.narrow(0, 0, 2)));
  EXPECT_TRUE(torch::equal(parts[1].tensors[0], whole.narrow(0, 2, 1)));
  parts[1].tensors[0].zero_();
  EXPECT_EQ(whole.sum().item<int>(), 0 + 1 + 2 + 3) << "they share the input's memory";
  EXPECT_FALSE(parts[0].changed());
  EXPECT_TRUE(parts[1].changed());
}

TEST(MicroBatch, AMissingGradientIsZeroInTheSizeOfItsPart) {
  const auto ones = [](std::int64_t samples) { return torch::ones({samples, 2}); };
  EXPECT_TRUE(torch::equal(gather_gradient({ones(3), Tensor(), ones(1)}, {3, 3, 1}),
                           torch::cat({ones(3), torch::zeros({3, 2}), ones(1)})));
  EXPECT_TRUE(torch::equal(gather_gradient({ones(3), Tensor()}, {3, 1}), torch::cat({ones(3), torch::zeros({1, 2})})));
  EXPECT_TRUE(torch::equal(gather_gradient({Tensor(), ones(1)}, {3, 1}), torch::cat({torch::zeros({3, 2}), ones(1)})));
  EXPECT_FALSE(gather_gradient({Tensor(), Tensor()}, {3, 1}).defined());
}

}  // namespace
}  // namespace gpipe
