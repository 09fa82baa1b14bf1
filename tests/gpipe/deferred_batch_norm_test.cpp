// Deferred batch norm: running statistics are updated once per mini-batch, and exact.
#include "tests/gpipe/helpers.h"

namespace gpipe {
namespace {

namespace nn = torch::nn;

constexpr std::int64_t kChannels = 3;

/// Running statistics in double.
class Statistics {
 public:
  void update(const Tensor& batch, double momentum) {
    const auto values = batch.transpose(0, 1).reshape({kChannels, -1}).to(torch::kDouble);
    mean_ = (1 - momentum) * mean_ + momentum * values.mean(1);
    variance_ = (1 - momentum) * variance_ + momentum * values.var(1);
  }
  template <class Norm>
  void expect_in(const Norm& norm, double tolerance = 1e-5) const {
    EXPECT_TRUE(torch::allclose(norm->running_mean.to(torch::kDouble), mean_, tolerance, 0)) << norm->running_mean;
    EXPECT_TRUE(torch::allclose(norm->running_var.to(torch::kDouble), variance_, tolerance, 0)) << norm->running_var;
  }

 private:
  Tensor mean_ = torch::zeros({kChannels}, torch::kDouble);
  Tensor variance_ = torch::ones({kChannels}, torch::kDouble);
};

/// Expects the running statistics after one mini-batch.
template <class Norm>
void expect_statistics(const Norm& norm, const Tensor& batch, double momentum = 0.1) {
  Statistics expected;
  expected.update(batch, momentum);
  expected.expect_in(norm);
}

/// Trains on three mini-batches with other means, and with a batch norm inside another module.
template <class Norm>
void check_exact(Norm norm, std::vector<std::int64_t> shape, double mean, std::int64_t chunks, Checkpoint checkpoint) {
  SCOPED_TRACE(testing::Message() << shape.size() << " dimensions, mean " << mean << ", momentum "
                                  << norm->options.momentum().value_or(-1) << ", " << chunks << " chunks, checkpoint "
                                  << to_string(checkpoint));
  torch::manual_seed(3);
  const bool steps = chunks == 4;
  GPipe pipe(Sequential(NestedSequential{{"inner", norm}}, nn::Identity()), {1, 1},
             in_chunks(chunks, checkpoint).schedule(steps ? "1f1b" : "gpipe").deferred_batch_norm(true));
  const auto squares = tensor_loss([](const Tensor& out, const Tensor&) { return out.square().sum(); });
  std::vector<std::int64_t> channels(shape.size(), 1);
  channels[1] = kChannels;
  const auto spread = torch::tensor({1.f, 0.5f, 3.f}).view(channels);
  Statistics expected;
  for (int step = 1; step <= 3; ++step) {
    const auto x = (torch::randn(shape) * spread + mean * step).requires_grad_();
    if (steps) pipe->step(x, x.detach(), squares, kOfSums);
    if (!steps) pipe->forward(x).square().sum().backward();
    expected.update(x.detach(), norm->options.momentum().value_or(1.0 / step));
  }
  expected.expect_in(norm, 1e-6);
  EXPECT_EQ(norm->num_batches_tracked.template item<std::int64_t>(), 3);
}

TEST(DeferredBatchNorm, IsExactOverTheMiniBatch) {
  for (const double mean : {0.5, 1e4}) {
    for (const auto& momentum : {std::optional(0.1), std::optional<double>()}) {
      const auto options = nn::BatchNormOptions(kChannels).momentum(momentum);
      for (const std::int64_t chunks : {1, 4, 11}) {
        for (const auto mode : kModes) {
          check_exact(nn::BatchNorm1d(options), {230, kChannels}, mean, chunks, mode);
          if (mode != Checkpoint::kExceptLast) continue;
          check_exact(nn::BatchNorm3d(options), {23, kChannels, 4, 5, 6}, mean, chunks, mode);
        }
      }
    }
  }
}

// A siamese network: two updates per mini-batch, in the order of the calls.
TEST(DeferredBatchNorm, UpdatesOncePerCallOfALayer) {
  struct TwiceImpl : nn::Module {
    Tensor forward(Tensor x) { return norm(x * 2 + 1) - norm(x); }
    nn::BatchNorm1d norm = register_module("norm", nn::BatchNorm1d(kChannels));
  };
  for (const auto mode : kModes) {
    const auto twice = std::make_shared<TwiceImpl>();
    GPipe pipe(Sequential(nn::Linear(kChannels, kChannels), twice), {1, 1},
               in_chunks(3, mode).deferred_batch_norm(true));
    const auto x = torch::randn({11, kChannels});
    const auto entering = pipe->children()[0]->as<nn::Linear>()->forward(x).detach();
    pipe->forward(x).sum().backward();
    Statistics expected;
    expected.update(entering * 2 + 1, 0.1);
    expected.update(entering, 0.1);
    expected.expect_in(twice->norm);
    EXPECT_EQ(twice->norm->num_batches_tracked.item<std::int64_t>(), 2);
  }
}

TEST(DeferredBatchNorm, LeavesARunningMeanWithoutAVarianceToPyTorch) {
  GPipe pipe(Sequential(Functional([](Tensor x) {
               return torch::batch_norm(x, {}, {}, torch::zeros({kChannels}), {}, true, 0.1, 1e-5, false);
             })),
             {1}, in_chunks(2).deferred_batch_norm(true));
  try {
    pipe->forward(torch::randn({6, kChannels}));
  } catch (const c10::Error&) {  // a version of PyTorch may refuse it
  }
}

TEST(DeferredBatchNorm, IsExactForReducedTypes) {
  for (const auto type : {torch::kHalf, torch::kBFloat16}) {
    for (const double sigma : {1.0, 300.0, 5000.0}) {
      SCOPED_TRACE(testing::Message() << type << ", sigma " << sigma);
      torch::manual_seed(5);
      nn::BatchNorm1d norm(kChannels);
      GPipe pipe(Sequential(norm), {1}, in_chunks(3).deferred_batch_norm(true));
      const auto batch = (torch::randn({50, kChannels}) * sigma + 2 * sigma).to(type);
      const torch::NoGradGuard no_grad;
      pipe->forward(batch);
      expect_statistics(norm, batch);
    }
  }
}

// The first layer passes on the samples whose first value is positive.
TEST(DeferredBatchNorm, IgnoresMicroBatchesAndMiniBatchesWithoutValues) {
  const auto positive = [](const Tensor& x) { return x.index({x.select(1, 0) > 0}); };
  const auto full = torch::rand({12, kChannels}) + 1;
  std::vector<Tensor> batches(3);
  for (std::int64_t empty = 0; empty < 3; ++empty) {
    batches[empty] = full.clone();
    batches[empty].narrow(0, 4 * empty, 4).select(1, 0).neg_();
  }
  for (const auto& batch : {full, torch::zeros({0, kChannels}), -full, full * 2}) batches.push_back(batch);
  const auto sum = tensor_loss([](const Tensor& out, const Tensor&) { return out.sum(); });
  for (const auto& momentum : {std::optional(0.1), std::optional<double>()}) {
    for (const auto mode : kModes) {
      nn::BatchNorm1d norm(nn::BatchNormOptions(kChannels).momentum(momentum));
      nn::BatchNorm1d alone(norm->options);
      GPipe pipe(Sequential(Functional(positive), norm), {1, 1}, in_chunks(3, mode).deferred_batch_norm(true));
      for (const auto& batch : batches) {
        pipe->step(batch, batch, sum, kOfSums);
        alone->forward(positive(batch));
        EXPECT_TRUE(torch::allclose(norm->running_mean, alone->running_mean)) << norm->running_mean;
        EXPECT_TRUE(torch::allclose(norm->running_var, alone->running_var)) << norm->running_var;
        EXPECT_EQ(norm->num_batches_tracked.item<std::int64_t>(), alone->num_batches_tracked.item<std::int64_t>());
      }
    }
  }
}

/// Calls the operator, which accepts a single value per channel; the module refuses it.
struct BareImpl : nn::Module {
  Tensor forward(const Tensor& x) {
    return torch::batch_norm(x, {}, {}, running_mean, running_var, /*training=*/true, /*momentum=*/0.1, /*eps=*/1e-5,
                             /*cudnn_enabled=*/false);
  }
  Tensor running_mean = register_buffer("running_mean", torch::zeros({kChannels}));
  Tensor running_var = register_buffer("running_var", torch::ones({kChannels}));
};
TORCH_MODULE(Bare);

TEST(DeferredBatchNorm, NeedsTwoValuesPerChannel) {
  nn::BatchNorm1d norm(kChannels);
  GPipe refusing(Sequential(norm), {1}, GPipeOptions().deferred_batch_norm(true));
  EXPECT_THROW(refusing->forward(torch::ones({1, kChannels})), c10::Error);
  EXPECT_EQ(norm->num_batches_tracked.item<std::int64_t>(), 0);

  Bare bare;
  GPipe pipe(Sequential(bare), {1}, in_chunks(2).deferred_batch_norm(true));
  pipe->forward(torch::full({1, kChannels}, 5.0));
  EXPECT_TRUE(same(bare->running_mean, torch::zeros({kChannels})));
  EXPECT_TRUE(same(bare->running_var, torch::ones({kChannels})));
  // Two micro-batches of one value each have a variance together.
  const auto batch = torch::randn({2, kChannels});
  pipe->forward(batch);
  expect_statistics(bare, batch);
}

TEST(DeferredBatchNorm, TrainsAndEvaluatesAsTheLayersThemselves) {
  torch::manual_seed(4);
  Sequential model{nn::BatchNorm1d(8), nn::Linear(8, 8), nn::BatchNorm1d(8)};
  GPipe pipe(model, {2, 1}, in_chunks(3).deferred_batch_norm(true).intraop_threads(torch::get_num_threads()));
  const auto x = torch::randn({14, 8}) + 2;
  const auto output = pipe->forward(x);
  pipe->eval();
  const auto before = copies(model->buffers());
  EXPECT_TRUE(torch::allclose(pipe->forward(x), model->forward(x)));
  EXPECT_TRUE(same(model->buffers(), before));
  model->train();
  std::vector<Tensor> parts;
  for (const auto& part : x.chunk(3)) parts.push_back(model->forward(part));
  EXPECT_TRUE(same(output, torch::cat(parts))) << "each micro-batch is normalised by its own statistics";
}

}  // namespace
}  // namespace gpipe
