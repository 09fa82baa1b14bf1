// Schedules that split the backward of each cell, compared with the same schedules with whole backwards.
#include <ATen/autocast_mode.h>
#include <ATen/record_function.h>
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gpipe/autograd/split_check.h"
#include "gpipe/schedules.h"
#include "gpipe/timeline.h"
#include "tests/gpipe/helpers.h"
#include "tests/gpipe/instruments.h"
#include "tests/gpipe/layers.h"

namespace gpipe {
namespace {

namespace nn = torch::nn;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr std::int64_t kWide = 128;
constexpr std::int64_t kSamples = 48;  // three micro-batches, large enough for products to be split

/// A layer with parameters of the given shapes.
struct OwnImpl : nn::Module {
  using Forward = std::function<Tensor(Tensor x, const std::vector<Tensor>& parameters)>;
  OwnImpl(const std::vector<std::vector<std::int64_t>>& shapes, Forward function) : function(std::move(function)) {
    for (const auto& shape : shapes) {
      own.push_back(register_parameter("p" + std::to_string(own.size()), torch::randn(shape) * 0.1));
    }
  }
  Tensor forward(Tensor x) { return function(std::move(x), own); }
  std::vector<Tensor> own;
  Forward function;
};

using Shapes = std::vector<std::vector<std::int64_t>>;
std::shared_ptr<OwnImpl> own(const Shapes& shapes, OwnImpl::Forward function) {
  return std::make_shared<OwnImpl>(shapes, std::move(function));
}

/// x * w, whose backward counts its runs.
struct CountedProduct : torch::autograd::Function<CountedProduct> {
  static Tensor forward(AutogradContext* context, Tensor x, Tensor w) {
    context->save_for_backward({x, w});
    return x.matmul(w);
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    ++runs;
    const auto saved = context->get_saved_variables();
    return {gradients[0].matmul(saved[1].t()), saved[0].t().matmul(gradients[0])};
  }
  inline static std::atomic<int> runs = 0;
};

// All forwards, then the I's, then the W's: as far apart as can be. With `split` false: a B in place of each I.
ScheduleFunction weights_last(bool split) {
  return [split](const Layout& layout, Checkpoint checkpoint) {
    auto lists = fill(layout);
    for (int stage = layout.stages; stage-- > 0;) {
      auto& list = lists[layout.placement[stage]];
      for (int m = 0; m < layout.micro_batches; ++m) list.push_back({split ? Kind::I : Kind::B, stage, m});
    }
    for (int stage = 0; split && stage < layout.stages; ++stage) {
      auto& list = lists[layout.placement[stage]];
      for (int m = 0; m < layout.micro_batches; ++m) list.push_back({Kind::W, stage, m});
    }
    return with_recomputes(std::move(lists), checkpoint, layout.micro_batches);
  };
}

struct Results {
  std::vector<Tensor> gradients;  // of the input and the parameters
  std::vector<Tensor> buffers;
};

const LossFunction kWeighted = tensor_loss([](const Tensor& out, const Tensor& t) { return (out * t).sum(); });

Results run(Sequential& model, const Balance& balance, GPipeOptions options, bool split, const Tensor& input) {
  const auto before = copies(model->buffers());
  GPipe pipe(model, balance, options.chunks(3).intraop_threads(1).schedule_function(weights_last(split)));
  torch::manual_seed(3);
  auto x = input.detach().clone();
  if (x.is_floating_point()) x.requires_grad_();
  Tensor out;
  {
    const torch::NoGradGuard no_grad;
    out = model->forward(x);
    for (std::size_t i = 0; i < before.size(); ++i) model->buffers()[i].copy_(before[i]);
  }
  const auto target = torch::linspace(-1, 1, out.numel()).view(out.sizes()).to(out.scalar_type());
  torch::manual_seed(3);
  pipe->step(x, target, kWeighted, StepOptions().reduction(Reduction::kSum));
  Results results;
  results.gradients.push_back(x.grad());
  for (auto& parameter : model->parameters()) {
    results.gradients.push_back(parameter.grad());
    parameter.mutable_grad() = Tensor();
  }
  results.buffers = copies(model->buffers());
  for (std::size_t i = 0; i < before.size(); ++i) model->buffers()[i].copy_(before[i]);
  return results;
}

// Under every checkpoint mode, cut in one and in two.
void expect_exact(Sequential model, const Tensor& input) {
  const auto layers = static_cast<std::int64_t>(model->size());
  for (const auto& balance : {Balance{layers}, Balance{1, layers - 1}}) {
    for (const auto mode : kModes) {
      for (const bool deferred : {false, true}) {
        const auto options = GPipeOptions().checkpoint(mode).deferred_batch_norm(deferred);
        const auto whole = run(model, balance, options, false, input);
        const auto split = run(model, balance, options, true, input);
        EXPECT_TRUE(same(whole.gradients, split.gradients)) << to_string(mode) << ", " << balance.size() << " stages";
        EXPECT_TRUE(same(whole.buffers, split.buffers)) << to_string(mode) << ", " << balance.size() << " stages";
      }
    }
  }
}

Tensor numbers() { return torch::randn({kSamples, kWide}); }
Linear wide() { return Linear(kWide, kWide); }
using Parameters = std::vector<Tensor>;

TEST(SplitBackward, IsExact) {
  torch::manual_seed(1);
  const auto matrix = std::vector<std::int64_t>{kWide, kWide};
  const std::vector<std::pair<std::string, std::shared_ptr<OwnImpl>>> layers = {
      {"a weight used twice on a path",
       own({matrix}, [](Tensor x, const Parameters& p) { return x.matmul(p[0]).tanh().matmul(p[0]); })},
      {"a weight used nine times", own({matrix},
                                       [](Tensor x, const Parameters& p) {
                                         for (int i = 0; i < 9; ++i) x = x.matmul(i % 2 ? p[0] : p[0].t()).tanh();
                                         return x;
                                       })},
      {"a weight used in a product and in a norm",
       own({matrix}, [](Tensor x, const Parameters& p) { return x.matmul(p[0]) * p[0].square().sum(); })},
      {"a transposed weight used by a product and by a sum", own({matrix},
                                                                 [](Tensor x, const Parameters& p) {
                                                                   const auto t = p[0].t();
                                                                   return x.matmul(t) + t.sum(0);
                                                                 })},
      {"a normalised weight",
       own({matrix}, [](Tensor x, const Parameters& p) { return x.matmul(p[0] / p[0].norm()); })},
      {"a weight in chunks", own({{kWide, 3 * kWide}},
                                 [](Tensor x, const Parameters& p) {
                                   const auto parts = p[0].chunk(3, 1);
                                   return x.matmul(parts[0]).tanh() * x.matmul(parts[1]) + x.matmul(parts[2]);
                                 })},
      {"several outputs of one operator", own({{kWide, 2 * kWide}, {kWide}},
                                              [](Tensor x, const Parameters& p) {
                                                const auto parts = x.matmul(p[0]).chunk(2, 1);
                                                return parts[0] * p[1] + 2 * parts[1].sigmoid();
                                              })},
      {"in-place operations on views",
       own({matrix, {kWide / 2}},
           [](Tensor x, const Parameters& p) {
             auto h = x.matmul(p[0]);
             h.narrow(1, 0, kWide / 2).mul_(p[1]);
             h.narrow(1, kWide / 2, kWide / 2).copy_(x.matmul(p[0]).narrow(1, 0, kWide / 2));
             return h.relu_();
           })},
      {"a product in place of a view", own({matrix},
                                           [](Tensor x, const Parameters& p) {
                                             auto h = x * 2;
                                             h.narrow(0, 0, h.size(0)).addmm_(x, p[0]);
                                             return h;
                                           })},
      {"a residual sum",
       own({matrix, matrix}, [](Tensor x, const Parameters& p) { return x + x.matmul(p[0]).relu().matmul(p[1]); })},
      {"a custom function",
       own({matrix, matrix},
           [](Tensor x, const Parameters& p) { return CountedProduct::apply(x.matmul(p[0]), p[1]); })},
      {"a product of both inputs",
       own({matrix}, [](Tensor x, const Parameters& p) { return x.matmul(x.t().matmul(x).matmul(p[0])) * 1e-3; })},
      {"batched products", own({{kWide / 4, kWide}},
                               [](Tensor x, const Parameters& p) {
                                 return torch::bmm(x.view({-1, 4, kWide / 4}), p[0].expand({x.size(0), -1, -1})).sum(1);
                               })},
      {"a convolution, in place after it", own({{16, 2, 5}, {16}},
                                               [](Tensor x, const Parameters& p) {
                                                 auto h = torch::conv1d(x.view({-1, 2, kWide / 2}), p[0], p[1], 1, 2);
                                                 return h.relu_().narrow(1, 0, 2).flatten(1);
                                               })},
      {"a hook", own({matrix, matrix},
                     [](Tensor x, const Parameters& p) {
                       auto h = x.matmul(p[0]);
                       if (h.requires_grad()) h.register_hook([](const Tensor& gradient) { return gradient * 2; });
                       return h.tanh().matmul(p[1]);
                     })},
      {"a buffer as a factor", own({matrix},
                                   [buffer = torch::ones({kSamples, kWide})](Tensor x, const Parameters& p) {
                                     const auto rows = buffer.narrow(0, 0, x.size(0));
                                     return torch::addmm(x, rows * 2, p[0]);
                                   })},
      {"a leaf of its own", own({matrix},
                                [](Tensor x, const Parameters& p) {
                                  const auto leaf = torch::ones({kWide, kWide}).requires_grad_();
                                  return x.matmul(p[0]).matmul(leaf);
                                })},
  };
  for (const auto& [name, layer] : layers) {
    SCOPED_TRACE(name);
    expect_exact(Sequential(wide(), layer, nn::Tanh(), wide()), numbers());
  }
}

struct RecurrentImpl : nn::Module {
  RecurrentImpl()
      : gru(register_module("gru", nn::GRU(nn::GRUOptions(8, 64).batch_first(true)))),
        lstm(register_module("lstm", nn::LSTM(nn::LSTMOptions(64, 8).batch_first(true)))) {}
  Tensor forward(Tensor x) {
    auto [h, state] = gru(x.view({-1, kWide / 8, 8}));
    return std::get<0>(lstm(h)).flatten(1);
  }
  nn::GRU gru;
  nn::LSTM lstm;
};
TORCH_MODULE(Recurrent);

struct AttentionImpl : nn::Module {
  AttentionImpl()
      : attention(
            register_module("attention", nn::MultiheadAttention(nn::MultiheadAttentionOptions(64, 4).dropout(0.2)))) {}
  Tensor forward(Tensor x) {
    const auto h = x.view({-1, 2, 64}).transpose(0, 1);
    return std::get<0>(attention(h, h, h)).transpose(0, 1).flatten(1);
  }
  nn::MultiheadAttention attention;
};
TORCH_MODULE(Attention);

struct ImageImpl : nn::Module {
  Tensor forward(Tensor x) { return x.view({-1, 2, 8, 8}); }
};
TORCH_MODULE(Image);

TEST(SplitBackward, IsExactForUsualLayers) {
  torch::manual_seed(1);
  expect_exact(Sequential(wide(), nn::Tanh(), wide(), nn::ReLU(nn::ReLUOptions(true)),
                          nn::LayerNorm(nn::LayerNormOptions({kWide})), wide()),
               numbers());
  expect_exact(Sequential(wide(), nn::Dropout(0.4), wide(), nn::BatchNorm1d(kWide),
                          nn::Dropout(nn::DropoutOptions(0.3).inplace(true)), wide()),
               numbers());
  expect_exact(Sequential(wide(), Recurrent(), wide()), numbers());
  expect_exact(Sequential(wide(), Attention(), wide()), numbers());
  expect_exact(Sequential(Image(), nn::Conv2d(nn::Conv2dOptions(2, 16, 3).padding(1)), nn::BatchNorm2d(16),
                          nn::ReLU(nn::ReLUOptions(true)),
                          nn::ConvTranspose2d(nn::ConvTranspose2dOptions(16, 4, 2).stride(2)), nn::GELU()),
               numbers());
  expect_exact(
      Sequential(wide(), Stash("a"), wide(), Stash("b"), nn::Tanh(), wide(), Pop("a"), wide(), Pop("b"), wide()),
      numbers());
}

TEST(SplitBackward, IsExactForSparseGradientsAndIntegerInputs) {
  torch::manual_seed(1);
  const auto ids = torch::randint(0, 50, {kSamples}, torch::kLong);
  for (const bool sparse : {false, true}) {
    Sequential model(nn::Embedding(nn::EmbeddingOptions(50, kWide).sparse(sparse)), wide(), nn::Tanh(), wide());
    const auto dense = [](std::vector<Tensor> tensors) {
      for (auto& tensor : tensors) {
        if (tensor.defined() && tensor.is_sparse()) tensor = tensor.to_dense();
      }
      return tensors;
    };
    for (const auto& balance : {Balance{4}, Balance{1, 3}, Balance{2, 2}}) {
      const auto whole = run(model, balance, {}, false, ids);
      const auto split = run(model, balance, {}, true, ids);
      EXPECT_TRUE(same(dense(whole.gradients), dense(split.gradients)));
    }
  }
}

// The last micro-batch is smaller.
TEST(SplitBackward, SumsInTheSameOrderForUnequalMicroBatches) {
  torch::manual_seed(1);
  for (const std::int64_t samples : {7, 46, 47}) {
    expect_exact(Sequential(wide(), nn::Tanh(), wide(), wide()), torch::randn({samples, kWide}));
  }
}

TEST(SplitBackward, SurvivesAnErrorInALongChain) {
  struct DeepImpl : nn::Module {
    DeepImpl() : weight(register_parameter("weight", torch::eye(64))) {}
    Tensor forward(Tensor x) {
      x = OnBackward::apply(x, &fail);
      for (int i = 0; i < 60000; ++i) x = x.matmul(weight);
      return x;
    }
    Tensor weight;
    std::function<void()> fail = [] { throw std::runtime_error("enough"); };
  };
  Sequential model(std::make_shared<DeepImpl>());
  EXPECT_THROW(run(model, {1}, {}, true, torch::ones({3, 64})), std::runtime_error);
}

TEST(SplitBackward, RunsCustomFunctionsAndHooksOnce) {
  torch::manual_seed(1);
  std::atomic<int> hooks = 0;
  Sequential model(wide(), own({{kWide, kWide}, {kWide, kWide}}, [&](Tensor x, const Parameters& p) {
                     auto h = x.matmul(p[0]);
                     if (h.requires_grad()) h.register_hook([&](const Tensor&) { ++hooks; });
                     return CountedProduct::apply(h, p[1]);
                   }));
  CountedProduct::runs = 0;
  run(model, {1, 1}, {}, true, numbers());
  EXPECT_EQ(CountedProduct::runs, 3);
  EXPECT_EQ(hooks, 3);
}

// Counts operators of the running action, by kind.
class Operators {
 public:
  Operators() : handle_(at::addGlobalCallback(at::RecordFunctionCallback(begin, end))) { counts.clear(); }
  ~Operators() { at::removeCallback(handle_); }
  Operators(const Operators&) = delete;
  Operators& operator=(const Operators&) = delete;

  int count(char kind, const std::string& name) const { return counts[{kind, name}]; }

 private:
  static std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& range) {
    const std::string name = range.name();
    if (range.scope() == at::RecordScope::USER_SCOPE && name.starts_with("gpipe 0")) kind_of_this_thread = name[7];
    if (range.scope() == at::RecordScope::FUNCTION) ++counts[{kind_of_this_thread, name}];
    return nullptr;
  }
  static void end(const at::RecordFunction&, at::ObserverContext*) {}

  // A pipeline of one stage has one worker.
  inline static std::map<std::pair<char, std::string>, int> counts;
  inline static thread_local char kind_of_this_thread = ' ';
  const at::CallbackHandle handle_;
};

TEST(SplitBackward, LeavesLargeProductsAndConvolutionsToW) {
  torch::manual_seed(1);
  Sequential model(wide(), nn::GELU(), wide(), nn::GELU(), wide());
  const auto x = numbers();
  run(model, {5}, {}, true, x);  // checks once whether backwards can be split
  {
    const Operators operators;
    run(model, {5}, {}, true, x);
    EXPECT_EQ(operators.count('I', "aten::mm"), 3 * 3);
    EXPECT_EQ(operators.count('W', "aten::mm"), 3 * 3);
    EXPECT_EQ(operators.count('I', "aten::gelu_backward"), 3 * 2);
    EXPECT_EQ(operators.count('W', "aten::gelu_backward"), 0);
  }
  Sequential small(Linear(8, 8), nn::GELU(), Linear(8, 8));
  const Operators operators;
  run(small, {3}, {}, true, torch::randn({kSamples, 8}));
  EXPECT_EQ(operators.count('I', "aten::mm"), 3 * 4);
  EXPECT_EQ(operators.count('W', "aten::mm"), 0);
}

// I frees seven results of pointwise operators, and leaves the input's gradient and those of the products' outputs.
TEST(SplitBackward, FreesWhatWDoesNotNeed) {
  torch::manual_seed(1);
  const auto pointwise = [] { return Functional([](Tensor x) { return x.sin().exp().tanh().sigmoid(); }); };
  Sequential model(wide(), pointwise(), wide(), pointwise());
  GPipe pipe(model, {4}, GPipeOptions().chunks(3).intraop_threads(1).schedule_function(weights_last(true)));
  const auto timeline = std::make_shared<Timeline>();
  const auto step = [&] {
    pipe->step(numbers().requires_grad_(), torch::ones({kSamples, kWide}), kWeighted,
               StepOptions().reduction(Reduction::kSum));
  };
  step();
  pipe->trace(timeline);
  step();
  std::map<std::string, Footprint> bytes;
  for (const auto& span : timeline->spans) bytes[to_string(span.action)] = span.bytes;
  const std::int64_t tensor = kSamples / 3 * kWide * 4;
  EXPECT_EQ(bytes["0I1"].after - bytes["0I1"].before, (3 - 7) * tensor);
  EXPECT_EQ(bytes["0W1"].after - bytes["0W1"].before, -3 * tensor);
}

TEST(SplitBackward, FallsBackWhereNodesCannotBeSplit) {
  EXPECT_TRUE(can_split_backward());
  EXPECT_FALSE(splits_exactly([](const auto&, const auto& inputs) { return SplitBackward({}, inputs); }));
  EXPECT_FALSE(splits_exactly([](const auto& roots, const auto&) { return SplitBackward(roots, {}); }));
  EXPECT_FALSE(splits_exactly([](const auto& roots, const auto& inputs) {
    for (auto& edge : roots[0].function->next_edges()) edge = torch::autograd::Edge();
    return SplitBackward(roots, inputs);
  }));
}

TEST(SplitBackward, IsExactUnderAutocast) {
  torch::manual_seed(1);
  Sequential model(wide(), nn::Tanh(), wide(), nn::ReLU(), wide());
  at::autocast::set_autocast_enabled(at::kCPU, true);
  const auto x = numbers();
  const auto whole = run(model, {2, 3}, {}, false, x);
  const auto split = run(model, {2, 3}, {}, true, x);
  at::autocast::set_autocast_enabled(at::kCPU, false);
  EXPECT_TRUE(same(whole.gradients, split.gradients));
}

}  // namespace
}  // namespace gpipe
