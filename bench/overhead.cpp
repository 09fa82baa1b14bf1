// Overhead per cell: a pipeline of very small layers, compared with a loop that does the same work without a pipeline.

#include <torch/nn/modules/linear.h>
#include <torch/utils.h>

#include <CLI/CLI.hpp>
#include <iostream>

#include "balance/trial.h"
#include "bench/measure.h"
#include "gpipe/gpipe.h"

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

void pipeline_step(GPipe& pipe, const torch::Tensor& input) { pipe->forward(input).sum().backward(); }

void measure(const Row& row, bool one_core, const Options& options) {
  torch::manual_seed(0);
  auto model = tiny_layers();
  GPipe pipe(tiny_layers(), std::vector<std::int64_t>(row.stages, kLayers / row.stages),
             GPipeOptions().chunks(row.chunks).checkpoint(row.checkpoint).intraop_threads(1));
  const auto input = torch::randn({row.chunks * kRows, kWidth});
  const auto plain = [&] { plain_step(model, input, row.chunks, row.checkpoint == Checkpoint::kAlways); };
  const double step = median(interleave({plain}, 9)[0]);
  const int steps = options.steps_only ? 1 : std::max(1, static_cast<int>(kSeconds / step));
  const auto times = interleave({[&] {
                                   for (int i = 0; i < steps; ++i) plain();
                                 },
                                 [&] {
                                   for (int i = 0; i < steps; ++i) pipeline_step(pipe, input);
                                 }},
                                options.repeats);
  Measurement cost{"overhead", row, "us/cell", {}, {}};
  Measurement ratio{"overhead", row, "of the plain loop's time", {}, {}};
  for (int repeat = 0; repeat < options.repeats; ++repeat) {
    cost.values.push_back((times[1][repeat] - times[0][repeat]) / steps / (row.chunks * row.stages) * 1e6);
    ratio.values.push_back(times[1][repeat] / times[0][repeat]);
  }
  if (options.steps_only) return print_steps(std::cout, row, "us_per_cell", cost.values);
  print(std::cout, one_core ? cost : ratio);
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
  add_steps_flag(app, options);
  bool one_core = true;
  app.add_flag("!--all-cores", one_core,
               "do not pin the process; print the ratio of the pipeline's time to the loop's instead");
  return run_program(app, argc, argv, [&] {
    if (one_core) pin_to_one_core();
    for_each_row(options, [&](const Row& row) { measure(row, one_core, options); });
  });
}
