#include "bench/measure.h"

#include <torch/cuda.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/utils.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <iostream>
#include <nlohmann/json.hpp>

#include "balance/trial.h"
#include "gpipe/base/checks.h"
#include "gpipe/base/clock.h"
#include "gpipe/nested.h"
#include "gpipe/schedules.h"
#include "models/resnet.h"
#include "models/unet.h"

namespace gpipe::bench {

namespace nn = torch::nn;

namespace {

nlohmann::ordered_json to_json(const char* kind, const std::string& name, const Row& row) {
  nlohmann::ordered_json json = {{kind, name},
                                 {"model", row.model},
                                 {"stages", row.stages},
                                 {"chunks", row.chunks},
                                 {"checkpoint", to_string(row.checkpoint)}};
  if (row.schedule != kForward) json["schedule"] = row.schedule;
  return json;
}

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

// Waits for the GPU, if there is one.
void synchronize() {
  static const bool has_gpu = torch::cuda::is_available();
  if (has_gpu) torch::cuda::synchronize();
}

// `large`: of a size for GPUs.
Subject subject_on_cpu(const std::string& name, int chunks, bool large) {
  torch::manual_seed(0);
  // The mini-batch is the same for every number of chunks.
  const auto split = [&](std::int64_t samples) {
    if (samples % chunks == 0) return samples / chunks;
    refuse_argument("the mini-batch of ", name, " has ", samples, " samples, which cannot be split into ", chunks,
                    " equal micro-batches");
  };
  if (name == "mlp") {
    const std::int64_t width = large ? 4096 : 1024;
    const std::int64_t rows = large ? 8192 : 1024;
    nn::Sequential model;
    for (int i = 0; i < 16; ++i) {
      model->push_back(NestedSequential({{"linear", nn::Linear(width, width)}, {"relu", nn::ReLU()}}));
    }
    return {name, model, torch::randn({rows, width}), split(rows)};
  }
  if (name == "unet") {
    auto model = models::unet(models::UNetOptions().base_channels(large ? 64 : 16));
    const std::int64_t side = large ? 192 : 96;
    return {name, model, torch::randn({16, 3, side, side}), split(16)};
  }
  if (name == "resnet18" || name == "resnet50") {
    auto model = name == "resnet18" ? models::resnet18() : models::resnet50();
    const std::int64_t side = large ? 224 : 64;
    return {name, model, torch::randn({16 * chunks, 3, side, side}), 16};
  }
  nn::Sequential model;
  for (int i = 0; i < 8; ++i) {
    model->push_back(Attention(256, 4));
    model->push_back(FeedForward(256));
  }
  return {name, model, torch::randn({32, 64, 256}), split(32)};
}

}  // namespace

void add_flags(CLI::App& app, Options& options) {
  app.option_defaults()->always_capture_default()->delimiter(',');
  app.add_option("--model", options.models, "models to run")->check(CLI::IsMember(options.models));
  auto* stages = app.add_option("--stages", options.stages, "numbers of stages");
  stages->check(CLI::PositiveNumber);
  const auto set_balance = [&](const std::vector<std::int64_t>& balance) {
    options.balance = balance;
    options.stages = {static_cast<int>(balance.size())};
  };
  app.add_option_function<std::vector<std::int64_t>>("--balance", set_balance, "layers per stage")
      ->always_capture_default(false)
      ->excludes(stages);
  app.add_option("--chunks", options.chunks, "numbers of micro-batches per mini-batch")->check(CLI::PositiveNumber);
  app.add_option("--checkpoint", options.checkpoints, "checkpoint modes")
      ->check(CLI::IsMember({"never", "except_last", "always"}));
  std::vector<std::string> names = {kForward};
  for (const auto& rule : schedule_rules()) names.emplace_back(rule.name);
  names.emplace_back(kAnySchedule);
  app.add_option("--schedule", options.schedules, "schedules of step(); forward: forward() and backward() instead")
      ->check(CLI::IsMember(names));
  app.add_option("--device", options.device, "device of all stages, such as cuda:0");
  app.add_option("--repeats", options.repeats, "measured repeats per row")->check(CLI::PositiveNumber);
}

void add_peer_flags(CLI::App& app, Options& options) {
  app.add_option("--stages-per-worker", options.stages_per_worker, "stages on each worker")->check(CLI::PositiveNumber);
  app.add_flag("--steps-only", options.steps_only, "print only the result of each step of the pipeline");
  app.add_flag("--over-ranks", options.over_ranks, "run over the processes that torchrun has started; rank 0 prints")
      ->needs("--steps-only")
      ->excludes("--device");
  app.add_option("--replicas", options.replicas, "divide the processes among so many pipelines")
      ->needs("--over-ranks")
      ->check(CLI::PositiveNumber);
}

std::shared_ptr<Ranks> join_ranks(const Options& options) {
  if (!options.over_ranks) return nullptr;
  return Ranks::from_environment(RanksOptions().replicas(options.replicas));
}

void for_each_row(const Options& options, const std::function<void(const Row&)>& measure) {
  for (const auto& model : options.models) {
    for (const int stages : options.stages) {
      for (const int chunks : options.chunks) {
        for (const auto& checkpoint : options.checkpoints) {
          measure({model, stages, chunks, checkpoints().at(checkpoint), kForward, options.stages_per_worker});
        }
      }
    }
  }
}

void print(const Measurement& measurement) {
  const double value = median(measurement.values);
  const auto [low, high] = std::minmax_element(measurement.values.begin(), measurement.values.end());
  auto line = to_json("bench", measurement.bench, measurement.row);
  line["value"] = value;
  line["unit"] = measurement.unit;
  line["min"] = *low;
  line["max"] = *high;
  line["repeats"] = measurement.values.size();
  std::cout << line << std::endl;
}

void print_steps(const Row& row, const std::map<std::string, std::vector<double>>& values) {
  auto line = to_json("peer", "gpipe", row);
  for (const auto& [name, of_name] : values) line[name] = of_name;
  std::cout << line << std::endl;
}

std::vector<std::vector<double>> interleave(const std::vector<std::function<void()>>& functions, int repeats) {
  std::vector<std::vector<double>> seconds(functions.size());
  for (const auto& function : functions) function();
  for (int repeat = 0; repeat < repeats; ++repeat) {
    for (std::size_t i = 0; i < functions.size(); ++i) {
      synchronize();
      const double start = now();
      functions[i]();
      synchronize();
      seconds[i].push_back(now() - start);
    }
  }
  return seconds;
}

std::vector<double> quotients(const std::vector<double>& values, const std::vector<double>& divisors) {
  std::vector<double> quotients;
  for (std::size_t i = 0; i < values.size(); ++i) quotients.push_back(values[i] / divisors[i]);
  return quotients;
}

Subject subject(const std::string& name, int chunks, torch::Device device) {
  auto made = subject_on_cpu(name, chunks, /*large=*/!device.is_cpu());
  made.model->to(device);
  made.input = made.input.to(device);
  return made;
}

GPipe make_pipe(const Subject& subject, const std::vector<std::int64_t>& balance, const Row& row,
                const std::shared_ptr<Ranks>& ranks) {
  auto options = GPipeOptions()
                     .split_size(subject.split_size)
                     .checkpoint(row.checkpoint)
                     .intraop_threads(1)
                     .stages_per_worker(row.stages_per_worker)
                     .ranks(ranks);
  const auto workers = static_cast<std::size_t>(row.stages / row.stages_per_worker);
  if (!ranks) options.devices(std::vector<torch::Device>(workers, subject.input.device()));
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
