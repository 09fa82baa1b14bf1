// Overhead per cell: a pipeline of very small layers, compared with a loop that does the same work without a pipeline.
// Also compares step() with forward() and backward().

#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/linear.h>
#include <torch/utils.h>

#include <CLI/CLI.hpp>
#include <iostream>
#include <memory>
#include <stdexcept>

#include "balance/trial.h"
#include "bench/measure.h"
#include "bench/subject.h"
#include "gpipe/gpipe.h"
#include "gpipe/loss.h"
#include "gpipe/ranks.h"
#include "gpipe/run/step_loss.h"

namespace gpipe::bench {
namespace {

namespace nn = torch::nn;

constexpr int kLayers = 16;
constexpr int kWidth = 8;
constexpr int kRows = 8;  // per micro-batch

constexpr double kSeconds = 0.02;  // per repeat

nn::Sequential tiny_layers() {
  nn::Sequential model;
  for (int i = 0; i < kLayers; ++i) model->push_back(nn::Linear(kWidth, kWidth));
  return model;
}

void plain_step(nn::Sequential& model, const torch::Tensor& input, int chunks, bool recompute) {
  for (const auto& part : input.chunk(chunks)) {
    if (recompute) {
      const torch::NoGradGuard no_grad;
      model->forward(part);
    }
    model->forward(part).sum().backward();
  }
}

GPipe tiny_pipe(const Row& row, const torch::Tensor& input, const std::shared_ptr<Ranks>& ranks = nullptr) {
  const Subject it{row.model, tiny_layers(), input, kRows};
  return make_pipe(it, std::vector<std::int64_t>(row.stages, kLayers / row.stages), row, ranks);
}

// A step without clearing the gradients, as the plain loop does.
std::function<void()> pipeline_step(const Row& row, const torch::Tensor& input, const std::shared_ptr<Ranks>& ranks) {
  auto pipe = tiny_pipe(row, input, ranks);
  if (row.schedule.empty()) return [=]() mutable { pipe->forward(input).sum().backward(); };
  return [=]() mutable { run_schedule(pipe, input); };
}

// What step() computes, by forward() and one backward.
std::function<void()> step_with_losses(const Row& row, const torch::Tensor& input) {
  auto pipe = tiny_pipe(row, input);
  return [=]() mutable {
    const auto outputs = pipe->forward(input).split(kRows);
    const auto targets = input.split(kRows);
    std::vector<torch::Tensor> losses;
    for (std::size_t i = 0; i < outputs.size(); ++i) losses.push_back(sum_loss(outputs[i], targets[i]));
    join_losses(losses, std::vector<double>(losses.size(), 1));
    torch::autograd::backward(losses, {});
  };
}

std::function<void()> repeated(int times, const std::function<void()>& function) {
  return [=] {
    for (int i = 0; i < times; ++i) function();
  };
}

void measure(const Row& row, bool one_core, const Options& options, const std::shared_ptr<Ranks>& ranks) {
  if (ranks && !options.steps_only) throw std::invalid_argument("--over-ranks needs --steps-only");
  torch::manual_seed(0);
  auto model = tiny_layers();
  const auto input = torch::randn({row.chunks * kRows, kWidth});
  if (ranks && ranks->rank() != 0) {
    interleave({pipeline_step(row, input, ranks)}, options.repeats);
    return;
  }
  const auto plain = [&] { plain_step(model, input, row.chunks, row.checkpoint == Checkpoint::kAlways); };
  const double step = median(interleave({plain}, 9)[0]);
  const int steps = options.steps_only ? 1 : std::max(1, static_cast<int>(kSeconds / step));
  std::vector<Row> rows = {row};
  if (row.schedule.empty() && !options.steps_only) {
    for (const char* schedule : {"gpipe", "1f1b"}) rows.emplace_back(row).schedule = schedule;
  }
  std::vector<std::function<void()>> functions = {repeated(steps, plain)};
  for (const auto& each : rows) functions.push_back(repeated(steps, pipeline_step(each, input, ranks)));
  if (rows.size() > 1) functions.push_back(repeated(steps, step_with_losses(row, input)));
  const auto times = interleave(functions, options.repeats);
  const auto us_per_cell = [&](const std::vector<double>& seconds, const std::vector<double>& compared) {
    std::vector<double> costs;
    for (int repeat = 0; repeat < options.repeats; ++repeat) {
      costs.push_back((seconds[repeat] - compared[repeat]) / steps / (row.chunks * row.stages) * 1e6);
    }
    return costs;
  };
  if (options.steps_only) return print_steps(std::cout, row, "us_per_cell", us_per_cell(times[1], times[0]));
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const auto& seconds = times[i + 1];
    if (!one_core) {
      print(std::cout, {"overhead", rows[i], "of the plain loop's time", quotients(seconds, times[0])});
      continue;
    }
    print(std::cout, {"overhead", rows[i], "us/cell", us_per_cell(seconds, times[0])});
    if (i == 0) continue;
    print(std::cout, {.bench = "overhead",
                      .row = rows[i],
                      .unit = "us/cell more than forward(), the losses and backward()",
                      .values = us_per_cell(seconds, times.back()),
                      .limit = 0});
  }
}

}  // namespace
}  // namespace gpipe::bench

int main(int argc, char** argv) {
  using namespace gpipe::bench;
  CLI::App app("Overhead of a pipeline per cell, in microseconds.");
  Options options{.models = {"16xLinear(8,8)"},
                  .stages = {2, 4},
                  .chunks = {8, 32},
                  .checkpoints = {gpipe::Checkpoint::kNever, gpipe::Checkpoint::kAlways},
                  .repeats = 41};
  add_flags(app, options);
  add_stages_flag(app, options);
  add_schedule_flag(app, options);
  add_steps_flag(app, options);
  add_ranks_flag(app, options);
  bool one_core = true;
  app.add_flag("!--all-cores", one_core,
               "do not pin the process; print the ratio of the pipeline's time to the loop's instead");
  return run_program(app, argc, argv, [&] {
    if (one_core) pin_to_one_core();
    const auto ranks = options.over_ranks ? gpipe::Ranks::from_environment() : nullptr;
    for_each_row(options, [&](const Row& row) { measure(row, one_core, options, ranks); });
  });
}
