// What users do that cannot work, or nearly cannot: never a crash, a hang or a wrong number.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/csrc/jit/frontend/tracer.h>
#include <torch/torch.h>

#include <cstdint>
#include <limits>
#include <thread>
#include <vector>

#include "gpipe/gpipe.h"
#include "gpipe/micro_batch.h"
#include "gpipe/schedule/verifier.h"
#include "tests/gpipe/layers.h"

namespace gpipe {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;
using torch::Tensor;
using torch::nn::Linear;
using torch::nn::Sequential;

constexpr Checkpoint kModes[] = {Checkpoint::kNever, Checkpoint::kExceptLast, Checkpoint::kAlways};

constexpr auto kHuge = std::numeric_limits<std::int64_t>::max();

TEST(MisuseTest, ABalanceWhoseSumOverflowsIsRefused) {
  Sequential model;
  for (int i = 0; i < 39; ++i) model->push_back(torch::nn::Identity());
  // In 64 bits these sum to 39.
  EXPECT_THAT(
      [&] {
        GPipe(model, {kHuge, kHuge, 41});
      },
      ThrowsMessage<std::invalid_argument>(
          HasSubstr("balance {9223372036854775807, 9223372036854775807, 41} sums to more than 2147483647")));
  // And in 32 bits these.
  EXPECT_THAT(
      [&] {
        GPipe(model, {std::int64_t{1} << 32, 39});
      },
      ThrowsMessage<std::invalid_argument>(HasSubstr("sums to")));
  EXPECT_THAT([&] { GPipe(model, {40, -1}); }, ThrowsMessage<std::invalid_argument>(HasSubstr("at least one layer")));
  EXPECT_THAT(
      [&] {
        GPipe(model, {20, 20});
      },
      ThrowsMessage<std::invalid_argument>(HasSubstr("balance {20, 20} sums to 40, but the model has 39 layers")));
}

TEST(MisuseTest, TooManyMicroBatchesAreRefused) {
  GPipe pipe(Sequential(torch::nn::Identity(), torch::nn::Identity()), {1, 1}, GPipeOptions().chunks(kHuge));
  EXPECT_EQ(pipe->forward(torch::ones({3, 1})).size(0), 3);
  const auto refused = [](const std::string& why) { return ThrowsMessage<std::invalid_argument>(HasSubstr(why)); };
  EXPECT_THAT([&] { pipe->program(std::numeric_limits<int>::max()); },
              refused("2 stages and 2147483647 micro-batches"));
  const auto samples = torch::ones({1, 1}).expand({std::int64_t{1} << 40, 1});
  EXPECT_THAT([&] { pipe->forward(samples); }, refused("1099511627776 micro-batches"));
  EXPECT_THAT([&] { micro_batch_sizes(4, 0, 0); }, refused("4 samples cannot be cut into 0 micro-batches"));
  EXPECT_THAT([&] { micro_batch_sizes(4, 1, -2); }, refused("micro-batches of -2 samples"));
  EXPECT_THAT([&] { micro_batch_sizes(-4, 1, 0); }, refused("a mini-batch of -4 samples"));
  EXPECT_EQ(micro_batch_sizes(kHuge, 2, 0).back(), kHuge / 2);
  EXPECT_EQ(micro_batch_sizes(kHuge, 1, kHuge), std::vector<std::int64_t>{kHuge});
}

TEST(MisuseTest, OutputsThatCannotBeJoinedLeaveNoTrace) {
  auto norm = torch::nn::BatchNorm1d(6);
  auto model = Sequential(norm, torch::nn::Functional([](Tensor x) { return x.sum(); }));
  GPipe pipe(model, {1, 1}, GPipeOptions().chunks(2));
  const auto x = torch::randn({4, 6});
  const auto state = at::detail::getDefaultCPUGenerator().get_state();
  EXPECT_THAT([&] { pipe->forward(x); }, ThrowsMessage<std::runtime_error>(HasSubstr("cannot be joined")));
  EXPECT_FALSE(pipe->last_error()) << "no action failed";
  EXPECT_EQ(norm->num_batches_tracked.item<std::int64_t>(), 0);
  EXPECT_TRUE(torch::equal(at::detail::getDefaultCPUGenerator().get_state(), state));
}

TEST(MisuseTest, ParametersChangedBeforeTheBackward) {
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

TEST(MisuseTest, StateCarriedFromOneMicroBatchToTheNext) {
  Tensor kept = torch::zeros({1, 6});
  auto model = Sequential(Linear(6, 6), torch::nn::Functional([&kept](Tensor x) {
                            const auto y = x + kept;
                            kept = x.slice(0, 0, 1);
                            return y;
                          }));
  GPipe pipe(model, {1, 1}, GPipeOptions().chunks(2).checkpoint(Checkpoint::kNever));
  EXPECT_THAT(
      [&] {
        pipe->forward(torch::randn({4, 6}));
      },
      ThrowsMessage<std::invalid_argument>(HasSubstr("detach")));
}

TEST(MisuseTest, TensorsOfTheSequentialItself) {
  Sequential model(Linear(6, 6));
  model->register_buffer("scale", torch::ones({1}));
  EXPECT_THAT([&] { GPipe(model, {1}); },
              ThrowsMessage<std::invalid_argument>(HasSubstr("has a buffer of its own, 'scale'")));
  NestedSequential nested({{"linear", Linear(6, 6)}});
  nested->register_parameter("weight", torch::ones({1}));
  EXPECT_THAT([&] { GPipe(nested, {1}); },
              ThrowsMessage<std::invalid_argument>(HasSubstr("has a parameter of its own, 'weight'")));
}

TEST(MisuseTest, ForwardModeDerivatives) {
  auto linear = Linear(6, 6);
  GPipe pipe(Sequential(linear), {1});
  const auto x = torch::randn({4, 6});
  const auto level = torch::autograd::ForwardADLevel::get_next_idx();
  const auto refused = [&](const Tensor& input) {
    EXPECT_THAT([&] { pipe->forward(input); }, ThrowsMessage<c10::NotImplementedError>(HasSubstr("has a tangent")));
  };
  EXPECT_EQ(pipe->forward(x).size(0), 4);  // an open level alone is no obstacle
  refused(at::_make_dual(x, torch::ones({4, 6}), static_cast<std::int64_t>(level)));
  linear->weight.detach()._set_fw_grad(torch::ones({6, 6}), level, /*is_inplace_op=*/false);
  EXPECT_EQ(pipe->forward(x).size(0), 4);  // of another tensor
  linear->weight._set_fw_grad(torch::ones({6, 6}), level, /*is_inplace_op=*/false);
  refused(x);
  torch::autograd::ForwardADLevel::release_idx(level);
  EXPECT_EQ(pipe->forward(x).size(0), 4);
}

TEST(MisuseTest, TracingByTorchscript) {
  GPipe pipe(Sequential(Linear(6, 6)), {1});
  torch::jit::tracer::setTracingState(std::make_shared<torch::jit::tracer::TracingState>());
  EXPECT_THAT(
      [&] {
        pipe->forward(torch::randn({4, 6}));
      },
      ThrowsMessage<c10::NotImplementedError>(HasSubstr("torch.jit.trace")));
  torch::jit::tracer::setTracingState(nullptr);
  EXPECT_EQ(pipe->forward(torch::randn({4, 6})).size(0), 4);
}

TEST(MisuseTest, AGraphFromOutsideIsRefusedAndUnharmed) {
  auto weight = torch::ones({6}).requires_grad_();
  const auto twice = weight * 2;
  GPipe pipe(Sequential(torch::nn::Functional([twice](Tensor x) { return x * twice; })), {1});
  EXPECT_THAT([&] { pipe->forward(torch::ones({2, 6})); }, ::testing::Throws<std::invalid_argument>());
  EXPECT_THAT([&] { pipe->forward(torch::ones({2, 6}).requires_grad_()); }, ::testing::Throws<std::invalid_argument>());
  twice.sum().backward();
  EXPECT_TRUE(torch::equal(weight.grad(), torch::full({6}, 2.0)));
}

TEST(MisuseTest, BuffersAreNotSharedByStages) {
  auto norm = torch::nn::BatchNorm1d(torch::nn::BatchNorm1dOptions(6).affine(false));
  NestedSequential one{{"norm", norm}};
  NestedSequential two{{"norm", norm}};
  EXPECT_THROW(GPipe(Sequential(one, two), {1, 1}), std::invalid_argument);
  EXPECT_NO_THROW(GPipe(Sequential(one, two), {2}));
}

TEST(MisuseTest, StagesMayShareABufferThatNoneWritesTo) {
  struct PositionsImpl : torch::nn::Module {
    explicit PositionsImpl(const Tensor& table) : table(register_buffer("table", table)) {}
    Tensor forward(Tensor x) {
      if (writes == 1) table.add_(1);
      if (writes == 2) table.variable_data().add_(1);
      return x * table;
    }
    Tensor table;
    int writes = 0;
  };
  const auto table = torch::arange(6.0);
  for (const int writes : {1, 2}) {
    auto second = std::make_shared<PositionsImpl>(table);
    Sequential model;
    model->push_back(std::make_shared<PositionsImpl>(table));
    model->push_back(second);
    GPipe pipe(model, {1, 1}, GPipeOptions().chunks(2));
    const auto x = torch::ones({4, 6});
    if (writes == 1) EXPECT_TRUE(torch::equal(pipe->forward(x), table.square().expand({4, 6})));
    second->writes = writes;
    EXPECT_THAT([&] { pipe->forward(x); }, ThrowsMessage<std::runtime_error>(HasSubstr("'table' of stages 0 and 1")));
    EXPECT_TRUE(torch::equal(table, torch::arange(6.0)));
    second->writes = 0;
    EXPECT_TRUE(torch::equal(pipe->forward(x), table.square().expand({4, 6})));
  }
}

TEST(MisuseTest, ABufferThatChangesItsShapeIsPutBackToo) {
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
  Sequential model;
  model->push_back(grow);
  GPipe pipe(model, {1}, GPipeOptions().chunks(2).checkpoint(Checkpoint::kAlways));
  EXPECT_THROW(pipe->forward(torch::randn({4, 6})), c10::Error);
  EXPECT_EQ(grow->seen.size(0), 1);
  grow->fail = false;
  pipe->forward(torch::randn({4, 6}).requires_grad_()).sum().backward();
  EXPECT_EQ(grow->seen.size(0), 3) << "once a micro-batch";
}

TEST(MisuseTest, APipelineCannotContainItself) {
  GPipeImpl* self = nullptr;
  auto model = Sequential(torch::nn::Functional([&self](Tensor x) { return self->forward(std::move(x)); }));
  GPipe pipe(model, {1});
  self = pipe.ptr().get();
  EXPECT_THROW(pipe->forward(torch::ones({1, 2})), std::logic_error);
}

TEST(MisuseTest, SeveralThreadsMayRunOneRetainedGraph) {
  auto model = Sequential(Linear(6, 6), torch::nn::Dropout(0.5), Linear(6, 6));
  GPipe pipe(model, {1, 2}, GPipeOptions().chunks(3).checkpoint(Checkpoint::kAlways));
  const auto x = torch::randn({6, 6}).requires_grad_();
  const auto loss = pipe->forward(x).pow(2).sum();
  const auto expected = torch::autograd::grad({loss}, {x}, {}, true)[0];
  std::vector<Tensor> got(8);
  std::vector<std::thread> threads;
  for (auto& gradient : got) {
    threads.emplace_back([&] { gradient = torch::autograd::grad({loss}, {x}, {}, true)[0]; });
  }
  for (auto& thread : threads) thread.join();
  for (const auto& gradient : got) EXPECT_TRUE(torch::equal(gradient, expected));
}

TEST(MisuseTest, ErrorsFoundBetweenLayersNameNoLayer) {
  struct ForgetfulImpl : torch::nn::Module, Skippable {
    ForgetfulImpl() : Skippable({.stash = {"s"}}) {}
    Tensor forward(Tensor x) { return x; }
  };
  Sequential model;
  model->push_back(std::make_shared<ForgetfulImpl>());
  model->push_back(Linear(6, 6));
  model->push_back(Pop("s"));
  GPipe pipe(model, {2, 1});
  EXPECT_THROW(pipe->forward(torch::randn({4, 6})), std::runtime_error);
  ASSERT_TRUE(pipe->last_error());
  EXPECT_EQ(pipe->last_error()->layer, -1);
}

// What a checkpointed cell passes through untouched keeps what it was: a mask that needs no gradient stays so.
TEST(MisuseTest, RecomputeSeesTheSameRequiresGrad) {
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
    Sequential model;
    model->push_back(first);
    model->push_back(second);
    GPipe pipe(model, {1, 1}, GPipeOptions().chunks(2).checkpoint(checkpoint));
    const auto out = pipe->forward(Value(std::make_tuple(torch::randn({4, 6}), torch::ones({4, 6}))));
    EXPECT_TRUE(out.tensors()[0].requires_grad());
    EXPECT_FALSE(out.tensors()[1].requires_grad());
    out.tensors()[0].sum().backward();
    EXPECT_FALSE(first->mask_required_grad || second->mask_required_grad);
  }
}

TEST(MisuseTest, OtherOutputsInARecompute) {
  struct MoodyImpl : torch::nn::Module {
    std::vector<Tensor> forward(std::vector<Tensor> in) {
      if (is_recomputing()) in.push_back(in[0] * 2);
      return in;
    }
  };
  Sequential model;
  model->push_back(std::make_shared<MoodyImpl>());
  GPipe pipe(model, {1}, GPipeOptions().chunks(2).checkpoint(Checkpoint::kAlways));
  const auto loss = pipe->forward(std::vector<Tensor>{torch::randn({4, 6}).requires_grad_()})[0].sum();
  EXPECT_THAT([&] { loss.backward(); }, ThrowsMessage<std::runtime_error>(HasSubstr("in its recompute")));
}

TEST(MisuseTest, PipelinesNest) {
  torch::manual_seed(6);
  auto inner_model = Sequential(Linear(6, 6), torch::nn::Dropout(0.5), Linear(6, 6));
  for (const auto checkpoint : kModes) {
    GPipe inner(inner_model, {1, 1, 1}, GPipeOptions().chunks(2).checkpoint(checkpoint));
    auto model =
        Sequential(Linear(6, 6), torch::nn::Functional([inner](Tensor x) mutable { return inner->forward(x); }));
    model->push_back(Linear(6, 6));
    GPipe pipe(model, {1, 2}, GPipeOptions().chunks(2).checkpoint(Checkpoint::kNever));
    // The inner pipeline's parameters belong to no layer here: that is refused, not lost.
    EXPECT_THROW(pipe->forward(torch::randn({4, 6})), std::invalid_argument);
    struct HolderImpl : torch::nn::Module {
      explicit HolderImpl(GPipe pipe) : pipe(register_module("pipe", pipe)) {}
      Tensor forward(Tensor x) { return pipe->forward(x); }
      GPipe pipe;
    };
    Sequential whole(Linear(6, 6));
    whole->push_back(std::make_shared<HolderImpl>(inner));
    GPipe outer(whole, {1, 1}, GPipeOptions().chunks(2).checkpoint(checkpoint));
    outer->trace(std::make_shared<Timeline>());  // which counts bytes on its own two workers only
    const auto x = torch::randn({8, 6}).requires_grad_();
    torch::manual_seed(8);
    const auto first = torch::autograd::grad({outer->forward(x).pow(2).sum()}, {x})[0];
    torch::manual_seed(8);
    EXPECT_TRUE(torch::equal(torch::autograd::grad({outer->forward(x).pow(2).sum()}, {x})[0], first));
    outer->forward(x).sum().backward();
    for (const auto& parameter : inner_model->parameters()) EXPECT_TRUE(parameter.grad().defined());
  }
}

TEST(MisuseTest, SparseGradientsAreSummed) {
  auto table = torch::nn::Embedding(torch::nn::EmbeddingOptions(10, 4).sparse(true));
  GPipe pipe(Sequential(table, Linear(4, 4)), {1, 1}, GPipeOptions().chunks(4));
  const auto ids = torch::tensor({1, 2, 2, 3, 1, 1, 9, 0});
  pipe->forward(ids).sum().backward();
  const auto got = table->weight.grad().to_dense();
  table->zero_grad();
  Sequential bare(table, Linear(4, 4));
  bare->ptr(1)->parameters()[0].data().copy_(pipe->parameters()[1].data());
  bare->forward(ids).sum().backward();
  EXPECT_TRUE(torch::allclose(got, table->weight.grad().to_dense()));
}

// Invariant 2, measured: graphs alive per stage never exceed what the verifier says, and reach it.
TEST(PeakTest, LiveGraphsStayWithinTheVerifiersBound) {
  for (const auto checkpoint : kModes) {
    auto first = std::make_shared<PeakImpl>();
    auto second = std::make_shared<PeakImpl>();
    Sequential model;
    model->push_back(first);
    model->push_back(second);
    GPipe pipe(model, {1, 1}, GPipeOptions().chunks(4).checkpoint(checkpoint));
    const auto program = pipe->program(4);
    const auto peaks = verify(program->layout(), program->edges(), program->schedule());
    ASSERT_TRUE(peaks.ok());
    pipe->forward(torch::randn({8, 6}).requires_grad_()).sum().backward();
    EXPECT_EQ(first->live->peak, peaks->graphs[0]);
    EXPECT_EQ(second->live->peak, peaks->graphs[1]);
    EXPECT_EQ(first->live->now, 0);
  }
}

}  // namespace
}  // namespace gpipe
