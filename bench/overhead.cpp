// What a cell costs above its layers: a pipeline of layers so small that nearly all is overhead, against the loop that
// does the same work without one.

#include <torch/nn/modules/linear.h>
#include <torch/utils.h>

#include <CLI/CLI.hpp>
#include <iostream>

#include "bench/measure.h"
#include "gpipe/gpipe.h"

namespace gpipe::bench {
namespace {

namespace nn = torch::nn;

constexpr int kLayers = 16;
constexpr int kWidth = 8;
constexpr int kRows = 8;  // of a micro-batch

struct Options {
  int repeats = 41;
  double seconds = 0.02;  // of one repeat
  bool one_core = true;
};

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

void measure(int stages, int chunks, Checkpoint checkpoint, const Options& options) {
  torch::manual_seed(0);
  auto model = tiny_layers();
  GPipe pipe(tiny_layers(), std::vector<std::int64_t>(stages, kLayers / stages),
             GPipeOptions().chunks(chunks).checkpoint(checkpoint).intraop_threads(1));
  const bool recompute = checkpoint == Checkpoint::kAlways;
  const auto input = torch::randn({chunks * kRows, kWidth});
  plain_step(model, input, chunks, recompute);
  const double step = interleave({[&] { plain_step(model, input, chunks, recompute); }}, 9)[0][4];
  const int steps = std::max(1, static_cast<int>(options.seconds / step));
  const auto times = interleave({[&] {
                                   for (int i = 0; i < steps; ++i) plain_step(model, input, chunks, recompute);
                                 },
                                 [&] {
                                   for (int i = 0; i < steps; ++i) pipeline_step(pipe, input);
                                 }},
                                options.repeats);
  Measurement line{"overhead", "16xLinear(8,8)", stages, chunks, recompute ? "always" : "never", "us/cell", {}, {}};
  Measurement ratio = line;
  ratio.unit = "of the plain loop's time";
  for (int repeat = 0; repeat < options.repeats; ++repeat) {
    const double plain = times[0][repeat];
    const double pipeline = times[1][repeat];
    line.values.push_back((pipeline - plain) / steps / (chunks * stages) * 1e6);
    ratio.values.push_back(pipeline / plain);
  }
  print(std::cout, options.one_core ? line : ratio);
}

}  // namespace
}  // namespace gpipe::bench

int main(int argc, char** argv) {
  using namespace gpipe::bench;
  CLI::App app("Overhead of a pipeline per cell, in microseconds.");
  app.option_defaults()->always_capture_default();
  Options options;
  app.add_option("--repeats", options.repeats)->check(CLI::PositiveNumber);
  app.add_flag("!--all-cores", options.one_core, "do not pin the process; print time over the plain loop's instead");
  CLI11_PARSE(app, argc, argv);
  if (options.one_core) pin_to_one_core();
  torch::set_num_threads(1);
  for (const int stages : {2, 4}) {
    for (const int chunks : {8, 32}) {
      for (const auto checkpoint : {gpipe::Checkpoint::kNever, gpipe::Checkpoint::kAlways}) {
        measure(stages, chunks, checkpoint, options);
      }
    }
  }
}
