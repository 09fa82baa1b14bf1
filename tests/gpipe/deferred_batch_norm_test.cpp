// Deferred batch norm: running statistics are updated once per mini-batch, and exact. Gradients are those of generated
// cases.
#include "tests/gpipe/layers.h"

namespace gpipe {
namespace {

namespace nn = torch::nn;

constexpr std::int64_t kChannels = 3;

/// Passes on the samples whose first value is positive.
Tensor positive_samples(const Tensor& x) { return x.index({x.flatten(1).select(1, 0) > 0}); }

/// Trains on mini-batches with micro-batches: expects the running statistics that the layer has without a pipeline, in
/// double, after each.
template <class Norm>
void check_exact(Norm norm, const std::vector<Tensor>& batches, std::int64_t chunks, Checkpoint checkpoint) {
  SCOPED_TRACE(testing::Message() << batches[0].sizes() << ", momentum " << norm->options.momentum().value_or(-1)
                                  << ", " << chunks << " chunks, checkpoint " << to_string(checkpoint));
  Norm alone(norm->options);
  alone->to(torch::kDouble);
  GPipe pipe(Sequential(Functional(positive_samples), NestedSequential{{"inner", norm}}, nn::Identity()), {1, 2},
             in_chunks(chunks, checkpoint).schedule(chunks == 4 ? "1f1b" : "gpipe").deferred_batch_norm(true));
  const auto squares = tensor_loss([](const Tensor& out, const Tensor&) { return out.square().sum(); });
  for (const auto& batch : batches) {
    pipe->step(batch, batch, squares, kOfSums);
    alone->forward(positive_samples(batch.to(torch::kDouble)));
    EXPECT_TRUE(torch::allclose(norm->running_mean.to(torch::kDouble), alone->running_mean, 1e-6, 0));
    EXPECT_TRUE(torch::allclose(norm->running_var.to(torch::kDouble), alone->running_var, 1e-6, 0));
    EXPECT_TRUE(same(norm->num_batches_tracked, alone->num_batches_tracked));
  }
}

TEST(DeferredBatchNorm, IsExactOverTheMiniBatch) {
  torch::manual_seed(3);
  const auto spread = torch::tensor({1.f, 0.5f, 3.f});
  // In the second mini-batch, no value of the first micro-batches is positive, and in the third none at all.
  const auto x = torch::randn({230, kChannels}) * spread + 1e4;
  const auto late = torch::cat({-x.slice(0, 0, 100), x.slice(0, 100)});
  for (const auto& momentum : {std::optional(0.1), std::optional<double>()}) {
    const auto options = nn::BatchNormOptions(kChannels).momentum(momentum);
    for (const std::int64_t chunks : {1, 4, 11}) {
      for (const auto mode : kModes) {
        check_exact(nn::BatchNorm1d(options), {x, late, -x, x.slice(0, 0, 0), x * 2}, chunks, mode);
      }
    }
    const auto volumes = (torch::rand({23, kChannels, 4, 5, 6}) + 1) * spread.view({-1, 1, 1, 1});
    check_exact(nn::BatchNorm3d(options), {volumes, volumes * 2}, 4, Checkpoint::kExceptLast);
  }
}

// A siamese network: two updates per mini-batch, in the order of the calls.
TEST(DeferredBatchNorm, UpdatesOncePerCallOfALayer) {
  const auto twice = [](nn::BatchNorm1d norm, const Tensor& x) { return norm->forward(x * 2 + 1) - norm->forward(x); };
  for (const auto mode : kModes) {
    const nn::BatchNorm1d norm(kChannels);
    const nn::BatchNorm1d alone(kChannels);
    const auto layer = function_layer([&](Tensor x) { return twice(norm, x); });
    layer->register_module("norm", norm);
    GPipe pipe(Sequential(nn::Identity(), layer), {1, 1}, in_chunks(3, mode).deferred_batch_norm(true));
    const auto x = torch::randn({11, kChannels});
    pipe->forward(x).sum().backward();
    twice(alone, x);
    EXPECT_TRUE(torch::allclose(norm->running_mean, alone->running_mean));
    EXPECT_TRUE(torch::allclose(norm->running_var, alone->running_var));
    EXPECT_EQ(norm->num_batches_tracked.item<std::int64_t>(), 2);
  }
}

TEST(DeferredBatchNorm, IsExactForReducedTypes) {
  for (const auto type : {torch::kHalf, torch::kBFloat16}) {
    torch::manual_seed(5);
    nn::BatchNorm1d norm(kChannels);
    const auto batch = (torch::randn({50, kChannels}) * 5000 + 10000).to(type);
    const torch::NoGradGuard no_grad;
    GPipe(Sequential(norm), {1}, in_chunks(3).deferred_batch_norm(true))->forward(batch);
    const auto values = batch.to(torch::kDouble);
    EXPECT_TRUE(torch::allclose(norm->running_mean.to(torch::kDouble), 0.1 * values.mean(0), 1e-5, 0)) << type;
    EXPECT_TRUE(torch::allclose(norm->running_var.to(torch::kDouble), 0.9 + 0.1 * values.var(0), 1e-5, 0)) << type;
  }
}

// The operator accepts a single value per channel; the module refuses it.
TEST(DeferredBatchNorm, NeedsTwoValuesPerChannel) {
  const auto mean = torch::zeros({kChannels});
  const auto variance = torch::ones({kChannels});
  const auto bare = function_layer([=](Tensor x) {
    return torch::batch_norm(x, {}, {}, mean, variance, /*training=*/true, /*momentum=*/0.1, /*eps=*/1e-5, false);
  });
  bare->register_buffer("running_mean", mean);
  bare->register_buffer("running_var", variance);
  GPipe pipe(Sequential(bare), {1}, in_chunks(2).deferred_batch_norm(true));
  pipe->forward(torch::full({1, kChannels}, 5.0));
  EXPECT_TRUE(same(mean, torch::zeros({kChannels})));
  EXPECT_TRUE(same(variance, torch::ones({kChannels})));
  // Two micro-batches of one value each have a variance together.
  const auto batch = torch::randn({2, kChannels});
  pipe->forward(batch);
  EXPECT_TRUE(torch::allclose(mean, 0.1 * batch.mean(0)));
  EXPECT_TRUE(torch::allclose(variance, 0.9 + 0.1 * batch.var(0)));
}

}  // namespace
}  // namespace gpipe
