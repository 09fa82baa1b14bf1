#include "bench/subject.h"

#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/utils.h>

#include <stdexcept>
#include <string>

#include "gpipe/nested.h"
#include "models/resnet.h"
#include "models/unet.h"

namespace gpipe::bench {

namespace nn = torch::nn;

namespace {

/// Self-attention over (sequences, tokens, width), with residual connection.
struct AttentionImpl : nn::Module {
  AttentionImpl(std::int64_t width, std::int64_t heads)
      : heads(heads),
        norm(register_module("norm", nn::LayerNorm(nn::LayerNormOptions({width})))),
        in(register_module("in", nn::Linear(width, 3 * width))),
        out(register_module("out", nn::Linear(width, width))) {}

  torch::Tensor forward(torch::Tensor x) {
    const auto n = x.size(0);
    const auto t = x.size(1);
    const auto qkv = in(norm(x)).view({n, t, 3, heads, -1}).permute({2, 0, 3, 1, 4});
    const auto y = at::scaled_dot_product_attention(qkv[0], qkv[1], qkv[2]);
    return x + out(y.transpose(1, 2).reshape({n, t, -1}));
  }

  const std::int64_t heads;
  nn::LayerNorm norm;
  nn::Linear in;
  nn::Linear out;
};
TORCH_MODULE(Attention);

struct FeedForwardImpl : nn::Module {
  explicit FeedForwardImpl(std::int64_t width)
      : norm(register_module("norm", nn::LayerNorm(nn::LayerNormOptions({width})))),
        in(register_module("in", nn::Linear(width, 4 * width))),
        out(register_module("out", nn::Linear(4 * width, width))) {}

  torch::Tensor forward(torch::Tensor x) { return x + out(torch::gelu(in(norm(x)))); }

  nn::LayerNorm norm;
  nn::Linear in;
  nn::Linear out;
};
TORCH_MODULE(FeedForward);

}  // namespace

Subject subject(const std::string& name, int chunks) {
  torch::manual_seed(0);
  // The mini-batch is the same for every number of chunks.
  const auto split = [&](std::int64_t samples) {
    if (samples % chunks == 0) return samples / chunks;
    throw std::invalid_argument("the mini-batch of " + name + " has " + std::to_string(samples) +
                                " samples, which cannot be split into " + std::to_string(chunks) +
                                " equal micro-batches");
  };
  if (name == "mlp") {
    nn::Sequential model;
    for (int i = 0; i < 16; ++i) {
      model->push_back(NestedSequential({{"linear", nn::Linear(1024, 1024)}, {"relu", nn::ReLU()}}));
    }
    return {name, model, torch::randn({1024, 1024}), split(1024)};
  }
  if (name == "unet") {
    auto model = models::unet(models::UNetOptions().base_channels(16));
    return {name, model, torch::randn({16, 3, 96, 96}), split(16)};
  }
  if (name == "resnet18" || name == "resnet50") {
    auto model = name == "resnet18" ? models::resnet18() : models::resnet50();
    return {name, model, torch::randn({16 * chunks, 3, 64, 64}), 16};
  }
  nn::Sequential model;
  for (int i = 0; i < 8; ++i) {
    model->push_back(Attention(256, 4));
    model->push_back(FeedForward(256));
  }
  return {name, model, torch::randn({32, 64, 256}), split(32)};
}

GPipe make_pipe(const Subject& subject, const std::vector<std::int64_t>& balance, const Row& row,
                const std::shared_ptr<Ranks>& ranks) {
  auto options = GPipeOptions()
                     .split_size(subject.split_size)
                     .checkpoint(row.checkpoint)
                     .intraop_threads(1)
                     .stages_per_worker(row.stages_per_worker)
                     .ranks(ranks);
  if (row.schedule != kForward) options.schedule(row.schedule);
  return GPipe(subject.model, balance, options);
}

torch::Tensor sum_loss(const torch::Tensor& output, const torch::Tensor&) { return output.sum(); }

void run_schedule(GPipe& pipe, const torch::Tensor& input) {
  const auto target = input.detach();  // step() needs one
  pipe->step(input, target, tensor_loss(sum_loss), StepOptions().reduction(Reduction::kSum));
}

void step(GPipe& pipe, const torch::Tensor& input, const std::string& schedule) {
  if (schedule == kForward) return step(pipe, input);
  clear_gradients(pipe);
  run_schedule(pipe, input);
}

}  // namespace gpipe::bench
