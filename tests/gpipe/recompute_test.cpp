// What a recompute must find as the forward found it, and leave as it is now.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

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

/// Gradients and buffers after one step with each checkpoint mode; those of the first, kNever, are right.
std::vector<std::vector<Tensor>> steps(const std::function<Sequential()>& make, std::int64_t chunks, const Tensor& x) {
  std::vector<std::vector<Tensor>> results;
  for (const auto checkpoint : kModes) {
    torch::manual_seed(0);
    auto model = make();
    GPipe pipe(model, std::vector<std::int64_t>(model->size(), 1),
               GPipeOptions().chunks(chunks).checkpoint(checkpoint).intraop_threads(1));
    for (int step = 0; step < 2; ++step) pipe->forward(x).pow(2).sum().backward();
    auto& result = results.emplace_back();
    for (const auto& parameter : model->parameters()) {
      result.push_back(parameter.detach().clone());
      result.push_back(parameter.grad());
    }
    for (const auto& buffer : model->buffers()) result.push_back(buffer.clone());
  }
  return results;
}

void expect_equal(const std::vector<std::vector<Tensor>>& results) {
  for (const auto& result : results) {
    ASSERT_EQ(result.size(), results.front().size());
    for (std::size_t i = 0; i < result.size(); ++i) {
      const auto& expected = results.front()[i];
      ASSERT_EQ(result[i].defined(), expected.defined());
      EXPECT_TRUE(!expected.defined() || torch::equal(result[i], expected)) << i;
    }
  }
}

/// Multiplies by a moving average that it updates first, as codebooks and observers do. `hidden` writes leave no trace
/// in the version counter.
struct AverageImpl : torch::nn::Module {
  AverageImpl(std::int64_t width, bool hidden)
      : linear(register_module("linear", Linear(6, 6))),
        average(register_buffer("average", torch::ones({width}))),
        hidden(hidden) {}
  Tensor forward(Tensor x) {
    auto target = hidden ? average.variable_data() : average;
    target.mul_(0.5).add_(x.detach().mean() + 1);
    return linear(x) * average.narrow(0, 0, 6).clone();  // later micro-batches write to it
  }
  Linear linear;
  Tensor average;
  bool hidden;
};

TEST(RecomputeTest, BuffersAreAsTheForwardFoundThem) {
  for (const bool hidden : {false, true}) {
    for (const std::int64_t width : {6, 100000}) {
      for (const std::int64_t chunks : {1, 3}) {
        SCOPED_TRACE(std::to_string(width) + (hidden ? " hidden, " : " plain, ") + std::to_string(chunks));
        expect_equal(steps(
            [&] {
              Sequential model(Linear(6, 6));
              model->push_back(std::make_shared<AverageImpl>(width, hidden));
              model->push_back(std::make_shared<AverageImpl>(width, hidden));
              return model;
            },
            chunks, torch::randn({6, 6})));
      }
    }
  }
}

TEST(RecomputeTest, ABufferThatBeginsToChangeIsNoticed) {
  struct TableImpl : torch::nn::Module {
    TableImpl()
        : linear(register_module("linear", Linear(6, 6))), table(register_buffer("table", torch::ones({100000}))) {}
    Tensor forward(Tensor x) {
      if (writes) table.add_(1);
      return linear(x) * table[0];
    }
    Linear linear;
    Tensor table;
    bool writes = false;
  };
  auto layer = std::make_shared<TableImpl>();
  Sequential model;
  model->push_back(layer);
  GPipe pipe(model, {1}, GPipeOptions().chunks(2).checkpoint(Checkpoint::kAlways));
  const auto x = torch::randn({4, 6});
  pipe->forward(x).sum().backward();
  layer->writes = true;
  EXPECT_THAT([&] { pipe->forward(x); }, ThrowsMessage<std::runtime_error>(HasSubstr("repeat the call")));
  EXPECT_TRUE(torch::equal(layer->table, torch::ones({100000})));
  layer->linear->zero_grad();
  pipe->forward(x).sum().backward();
  const auto expected = x.narrow(0, 0, 2).sum(0) * 2 + x.narrow(0, 2, 2).sum(0) * 3;
  EXPECT_TRUE(torch::allclose(layer->linear->weight.grad(), expected.expand({6, 6})));
}

TEST(RecomputeTest, EmbeddingsThatRenormaliseTheirRows) {
  const auto ids = torch::tensor({0, 3, 3, 1, 0, 2});
  expect_equal(steps(
      [] {
        return Sequential(torch::nn::Embedding(torch::nn::EmbeddingOptions(4, 6).max_norm(0.5)), Linear(6, 6),
                          Linear(6, 6));
      },
      3, ids));
}

TEST(RecomputeTest, OthersMayNotWriteToAParameterThatItsLayerWritesToo) {
  auto table = torch::nn::Embedding(torch::nn::EmbeddingOptions(4, 6).max_norm(0.5));
  GPipe pipe(Sequential(table), {1}, GPipeOptions().chunks(2).checkpoint(Checkpoint::kAlways));
  const auto ids = torch::tensor({0, 3, 3, 1});
  const auto first = pipe->forward(ids).sum();
  const auto second = pipe->forward(ids).sum();
  first.backward();
  {
    torch::NoGradGuard no_grad;
    table->weight.mul_(2);
  }
  EXPECT_THAT([&] { second.backward(); }, ThrowsMessage<std::runtime_error>(HasSubstr("step the optimizer after")));
  pipe->forward(ids).sum().backward();
}

/// Forces: the negative gradient of an energy by positions, a leaf that the layer makes for itself.
struct ForcesImpl : torch::nn::Module {
  ForcesImpl()
      : energy(register_module("energy", Linear(6, 1))), stiffness(register_parameter("k", torch::ones({6}))) {}
  Tensor forward(Tensor x) {
    torch::AutoGradMode grad(true);
    const auto graph = x.requires_grad();
    auto position = x.detach().requires_grad_();
    const auto sum = (energy(position.tanh()) + (stiffness * position.pow(2)).sum()).sum();
    return -torch::autograd::grad({sum}, {position}, {}, true, /*create_graph=*/true)[0] + (graph ? x : x.detach());
  }
  Linear energy;
  Tensor stiffness;
};

TEST(RecomputeTest, LayersMayDifferentiateInside) {
  expect_equal(steps(
      [] {
        Sequential model(Linear(6, 6));
        model->push_back(std::make_shared<ForcesImpl>());
        model->push_back(Linear(6, 6));
        return model;
      },
      3, torch::randn({6, 6})));
}

TEST(RecomputeTest, ALeafThatIsKeptIsRefused) {
  const auto kept = torch::ones({6}).requires_grad_();
  GPipe pipe(Sequential(torch::nn::Functional([kept](Tensor x) { return x * kept; })), {1}, GPipeOptions().chunks(2));
  EXPECT_THAT(
      [&] {
        pipe->forward(torch::ones({2, 6}));
      },
      ThrowsMessage<std::invalid_argument>(HasSubstr("neither a parameter nor an input")));
}

TEST(RecomputeTest, DetachedOutputsNeedNoGradient) {
  for (const auto checkpoint : kModes) {
    struct StatisticsImpl : torch::nn::Module {
      std::tuple<Tensor, Tensor> forward(Tensor x) { return {x, x.detach() * 2}; }
    };
    struct PassImpl : torch::nn::Module {
      std::tuple<Tensor, Tensor> forward(std::tuple<Tensor, Tensor> in) {
        return {std::get<0>(in) * 2, std::get<1>(in) + 1};
      }
    };
    Sequential model(Linear(6, 6));
    model->push_back(std::make_shared<StatisticsImpl>());
    model->push_back(std::make_shared<PassImpl>());
    GPipe pipe(model, {1, 1, 1}, GPipeOptions().chunks(2).checkpoint(checkpoint));
    for (int step = 0; step < 2; ++step) {
      const auto out = pipe->forward(Value(torch::randn({4, 6}))).tensors();
      EXPECT_TRUE(out[0].requires_grad());
      EXPECT_FALSE(out[1].requires_grad());
      out[0].sum().backward();
    }
  }
}

TEST(RecomputeTest, AnOutputThatNeedsAGradientOnlyNowIsNoticed) {
  struct SwitchImpl : torch::nn::Module {
    SwitchImpl() : linear(register_module("linear", Linear(6, 6))) {}
    std::tuple<Tensor, Tensor> forward(Tensor x) {
      const auto y = linear(x);
      return {y, on ? y * 2 : y.detach()};
    }
    Linear linear;
    bool on = false;
  };
  auto layer = std::make_shared<SwitchImpl>();
  Sequential model;
  model->push_back(layer);
  GPipe pipe(model, {1}, GPipeOptions().chunks(2).checkpoint(Checkpoint::kAlways));
  const auto x = torch::randn({4, 6});
  pipe->forward(Value(x)).tensors()[0].sum().backward();
  layer->on = true;
  const auto out = pipe->forward(Value(x)).tensors();
  EXPECT_THAT([&] { out[0].sum().backward(); }, ThrowsMessage<std::runtime_error>(HasSubstr("repeat the call")));
  layer->linear->zero_grad();
  const auto again = pipe->forward(Value(x)).tensors();
  (again[0].sum() + again[1].sum()).backward();
  EXPECT_TRUE(torch::allclose(layer->linear->bias.grad(), torch::full({6}, 12.0)));
}

TEST(RecomputeTest, HooksOfUnusedParametersAreNotCalled) {
  struct HalfUsedImpl : torch::nn::Module {
    HalfUsedImpl() : used(register_parameter("used", torch::ones({6}))) {
      unused = register_parameter("unused", torch::ones({6}));
    }
    Tensor forward(Tensor x) { return x * used; }
    Tensor used;
    Tensor unused;
  };
  for (const auto checkpoint : kModes) {
    auto layer = std::make_shared<HalfUsedImpl>();
    int calls = 0;
    for (const auto& parameter : layer->parameters()) {
      parameter.register_hook([&calls](Tensor gradient) {
        EXPECT_TRUE(gradient.defined());
        ++calls;
        return gradient * 2;
      });
    }
    Sequential model;
    model->push_back(layer);
    GPipe pipe(model, {1}, GPipeOptions().chunks(2).checkpoint(checkpoint));
    pipe->forward(torch::ones({4, 6})).sum().backward();
    EXPECT_EQ(calls, 1);
    EXPECT_TRUE(torch::equal(layer->used.grad(), torch::full({6}, 8.0)));
    EXPECT_FALSE(layer->unused.grad().defined());
  }
}

}  // namespace
}  // namespace gpipe
