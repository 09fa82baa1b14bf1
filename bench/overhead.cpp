// Overhead per cell: a pipeline of very small layers, compared with a loop that does the same work without a pipeline.
// Also compares step() with forward(), the same losses and backward().

#include <sched.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/linear.h>
#include <torch/utils.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <memory>
#include <system_error>

#include "balance/trial.h"
#include "bench/measure.h"
#include "bench/program.h"
#include "gpipe/gpipe.h"
#include "gpipe/run/step_loss.h"

namespace gpipe::bench {
namespace {

namespace nn = torch::nn;

constexpr int kLayers = 16;
constexpr int kWidth = 8;
constexpr int kRows = 8;  // per micro-batch

constexpr double kSeconds = 0.02;  // per repeat

// Pins this process to one core. REQUIRES: no other thread has started.
void pin_to_one_core() {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  CPU_SET(0, &cores);
  if (sched_setaffinity(0, sizeof cores, &cores) != 0) {
    throw std::system_error(errno, std::generic_category(), "cannot pin this process to a core");
  }
}

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

GPipe tiny_pipe(const Row& row, const torch::Tensor& input, const Options& options,
                const std::shared_ptr<Ranks>& ranks) {
  auto balance = options.balance;
  if (balance.empty()) balance.assign(row.stages, kLayers / row.stages);
  return make_pipe({row.model, tiny_layers(), input, kRows}, balance, row, ranks);
}

// Does not clear the gradients, as the plain loop does not.
void pipeline_step(GPipe& pipe, const torch::Tensor& input, const std::string& schedule) {
  schedule == kForward ? pipe->forward(input).sum().backward() : run_schedule(pipe, input);
}

// What step() computes, by forward() and one backward.
void step_with_losses(GPipe& pipe, const torch::Tensor& input) {
  std::vector<torch::Tensor> losses;
  for (const auto& output : pipe->forward(input).split(kRows)) losses.push_back(sum_loss(output, output));
  join_losses(losses, std::vector<double>(losses.size(), 1));
  torch::autograd::backward(losses, {});
}

void measure(const Row& row, bool one_core, const Options& options, const std::shared_ptr<Ranks>& ranks) {
  torch::manual_seed(0);
  auto model = tiny_layers();
  model->to(torch::Device(options.device));
  const auto input = torch::randn({row.chunks * kRows, kWidth}).to(torch::Device(options.device));
  const auto plain = [&] { plain_step(model, input, row.chunks, row.checkpoint == Checkpoint::kAlways); };
  int steps = 1;
  if (!options.steps_only) steps = std::max(1, static_cast<int>(kSeconds / median(interleave({plain}, 9)[0])));
  std::vector<std::function<void()>> functions;
  const auto add = [&](auto function) {
    functions.emplace_back([=]() mutable {
      for (int i = 0; i < steps; ++i) function();
    });
  };
  if (!ranks || ranks->rank() == 0) add(plain);
  std::vector<Row> rows;
  for (const auto& schedule : options.schedules) {
    rows.emplace_back(row).schedule = schedule;
    add([&, schedule, pipe = tiny_pipe(rows.back(), input, options, ranks)]() mutable {
      pipeline_step(pipe, input, schedule);
    });
  }
  if (!options.steps_only) {
    add([&, pipe = tiny_pipe(row, input, options, nullptr)]() mutable { step_with_losses(pipe, input); });
  }
  const auto times = interleave(functions, options.repeats);
  if (ranks && ranks->rank() != 0) return;
  const auto us_per_cell = [&](const std::vector<double>& seconds, const std::vector<double>& compared) {
    std::vector<double> costs;
    for (int repeat = 0; repeat < options.repeats; ++repeat) {
      costs.push_back((seconds[repeat] - compared[repeat]) / steps / (row.chunks * row.stages) * 1e6);
    }
    return costs;
  };
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const auto& seconds = times[i + 1];
    if (options.steps_only) {
      print_steps(rows[i], {{"us_per_cell", us_per_cell(seconds, times[0])}});
    } else if (!one_core) {
      print({"overhead", rows[i], "of the plain loop's time", quotients(seconds, times[0])});
    } else {
      print({"overhead", rows[i], "us/cell", us_per_cell(seconds, times[0])});
      if (rows[i].schedule == kForward) continue;
      print({"overhead", rows[i], "us/cell more than forward(), the losses and backward()",
             us_per_cell(seconds, times.back())});
    }
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
                  .schedules = {kForward, "gpipe", "1f1b"},
                  .repeats = 41};
  add_flags(app, options);
  add_peer_flags(app, options);
  bool one_core = true;
  app.add_flag("!--all-cores", one_core,
               "do not pin the process; print the ratio of the pipeline's time to the loop's instead");
  return run_program(app, argc, argv, [&] {
    if (one_core) pin_to_one_core();
    const auto ranks = join_ranks(options);
    for_each_row(options, [&](const Row& row) { measure(row, one_core, options, ranks); });
  });
}
