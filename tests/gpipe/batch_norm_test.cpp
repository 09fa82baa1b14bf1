// Running statistics of batch norm: once a micro-batch, or, deferred, once a mini-batch and exact.
#include <gtest/gtest.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/linear.h>
#include <torch/utils.h>

#include <memory>
#include <optional>
#include <stdexcept>
#include <vector>

#include "gpipe/gpipe.h"

namespace gpipe {
namespace {

namespace nn = torch::nn;

constexpr std::int64_t kChannels = 3;

// A batch norm behind something that a pipeline does not look into, and a layer that can fail.
template <class Norm>
struct WrappedImpl : nn::Module {
  explicit WrappedImpl(std::optional<double> momentum) {
    norm = register_module("inner", Norm(nn::BatchNormOptions(kChannels).momentum(momentum)));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    if (calls++ == fail_at) throw std::runtime_error("out of paper");
    return norm(x);
  }

  Norm norm = nullptr;
  int calls = 0;
  int fail_at = -1;
};

struct Case {
  std::int64_t dims;
  double mean;
  std::optional<double> momentum;
  std::int64_t chunks;
  Checkpoint checkpoint;
};

std::vector<torch::Tensor> inputs(const Case& c) {
  std::vector<std::int64_t> shape = {23, kChannels};
  for (std::int64_t d = 0; d < c.dims - 1; ++d) shape.push_back(4 + d);
  if (c.dims == 1) shape[0] = 230;
  std::vector<std::int64_t> channels(shape.size(), 1);
  channels[1] = kChannels;
  std::vector<torch::Tensor> batches;
  for (int step = 0; step < 3; ++step) {
    const auto spread = torch::tensor({1.f, 0.5f, 3.f}).view(channels);
    batches.push_back(torch::randn(shape) * spread + c.mean * (step + 1));
  }
  return batches;
}

// What a channel's values are over all else, in double.
torch::Tensor by_channel(const torch::Tensor& batch) {
  return batch.transpose(0, 1).reshape({kChannels, -1}).to(torch::kDouble);
}

template <class Norm>
void check_exact(const Case& c) {
  SCOPED_TRACE(testing::Message() << c.dims << "-d, mean " << c.mean << ", momentum " << c.momentum.value_or(-1) << ", "
                                  << c.chunks << " chunks, checkpoint " << static_cast<int>(c.checkpoint));
  torch::manual_seed(3);
  const auto wrapped = std::make_shared<WrappedImpl<Norm>>(c.momentum);
  nn::Sequential model{nn::ModuleHolder<WrappedImpl<Norm>>(wrapped), nn::Identity()};
  GPipe pipe(model, {1, 1}, GPipeOptions().chunks(c.chunks).checkpoint(c.checkpoint).deferred_batch_norm(true));
  auto mean = torch::zeros({kChannels}, torch::kDouble);
  auto variance = torch::ones({kChannels}, torch::kDouble);
  int step = 0;
  for (const auto& batch : inputs(c)) {
    pipe->forward(batch.detach().requires_grad_()).square().sum().backward();
    const double momentum = c.momentum.value_or(1.0 / ++step);
    const auto values = by_channel(batch);
    mean = (1 - momentum) * mean + momentum * values.mean(1);
    variance = (1 - momentum) * variance + momentum * values.var(1);
  }
  const auto& norm = *wrapped->norm;
  EXPECT_TRUE(torch::allclose(norm.running_mean.to(torch::kDouble), mean, 1e-6, 0)) << norm.running_mean << mean;
  EXPECT_TRUE(torch::allclose(norm.running_var.to(torch::kDouble), variance, 1e-6, 0)) << norm.running_var << variance;
  EXPECT_EQ(norm.num_batches_tracked.template item<std::int64_t>(), 3);
}

TEST(DeferredBatchNormTest, IsExactOverTheMiniBatch) {
  for (const double mean : {0.5, 1e4}) {
    for (const auto& momentum : {std::optional(0.1), std::optional<double>()}) {
      for (const std::int64_t chunks : {1, 4, 11}) {
        for (const auto mode : {Checkpoint::kNever, Checkpoint::kExceptLast, Checkpoint::kAlways}) {
          check_exact<nn::BatchNorm1d>({1, mean, momentum, chunks, mode});
          check_exact<nn::BatchNorm2d>({3, mean, momentum, chunks, mode});
          check_exact<nn::BatchNorm3d>({4, mean, momentum, chunks, mode});
        }
      }
    }
  }
}

TEST(DeferredBatchNormTest, NormalisesAsEver) {
  for (const bool deferred : {false, true}) {
    torch::manual_seed(4);
    nn::Sequential model{nn::BatchNorm1d(8), nn::Linear(8, 8), nn::BatchNorm1d(8)};
    GPipe pipe(model, {2, 1},
               GPipeOptions().chunks(3).deferred_batch_norm(deferred).intraop_threads(torch::get_num_threads()));
    const auto x = torch::randn({14, 8});
    const auto output = pipe->forward(x);
    std::vector<torch::Tensor> parts;
    for (const auto& part : x.chunk(3)) parts.push_back(model->forward(part));
    EXPECT_TRUE(torch::equal(output, torch::cat(parts)));
  }
}

TEST(DeferredBatchNormTest, EvaluationUsesAndKeepsTheStatistics) {
  nn::Sequential model{nn::BatchNorm1d(8), nn::Linear(8, 8)};
  GPipe pipe(model, {1, 1},
             GPipeOptions().chunks(2).deferred_batch_norm(true).intraop_threads(torch::get_num_threads()));
  pipe->forward(torch::randn({8, 8}) + 2);
  pipe->eval();
  const auto before = pipe->named_buffers().find("0.running_mean")->clone();
  const auto x = torch::randn({8, 8});
  EXPECT_TRUE(torch::allclose(pipe->forward(x), model->forward(x)));
  EXPECT_TRUE(torch::equal(*pipe->named_buffers().find("0.running_mean"), before));
}

TEST(DeferredBatchNormTest, AFailedForwardLeavesThemAlone) {
  const auto wrapped = std::make_shared<WrappedImpl<nn::BatchNorm1d>>(0.1);
  nn::Sequential model{nn::ModuleHolder<WrappedImpl<nn::BatchNorm1d>>(wrapped), nn::Identity()};
  GPipe pipe(model, {1, 1}, GPipeOptions().chunks(4).deferred_batch_norm(true));
  wrapped->fail_at = 2;
  const auto x = torch::randn({16, kChannels});
  EXPECT_THROW(pipe->forward(x), std::runtime_error);
  EXPECT_TRUE(torch::equal(wrapped->norm->running_mean, torch::zeros({kChannels})));
  EXPECT_EQ(wrapped->norm->num_batches_tracked.item<std::int64_t>(), 0);
  pipe->forward(x);
  EXPECT_TRUE(torch::allclose(wrapped->norm->running_mean, 0.1 * x.mean(0), 1e-6, 1e-8));
  EXPECT_EQ(wrapped->norm->num_batches_tracked.item<std::int64_t>(), 1);
}

TEST(BatchNormTest, IsUpdatedOnceAMicroBatchAndNotInARecompute) {
  for (const auto mode : {Checkpoint::kNever, Checkpoint::kAlways}) {
    nn::Sequential model{nn::BatchNorm1d(8), nn::Linear(8, 8)};
    nn::BatchNorm1d alone(8);
    GPipe pipe(model, {1, 1}, GPipeOptions().chunks(4).checkpoint(mode).intraop_threads(torch::get_num_threads()));
    const auto x = torch::randn({16, 8});
    pipe->forward(x).sum().backward();
    for (const auto& part : x.chunk(4)) alone->forward(part);
    EXPECT_TRUE(torch::equal(*pipe->named_buffers().find("0.running_mean"), alone->running_mean));
    EXPECT_TRUE(torch::equal(*pipe->named_buffers().find("0.running_var"), alone->running_var));
    EXPECT_EQ(pipe->named_buffers().find("0.num_batches_tracked")->item<std::int64_t>(), 4);
  }
}

}  // namespace
}  // namespace gpipe
