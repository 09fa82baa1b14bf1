// The cost of splitting a backward: the time of I and W, compared with a whole backward B. One stage on one
// core.

#include <torch/nn/modules/linear.h>

#include <CLI/CLI.hpp>
#include <iostream>

#include "bench/measure.h"
#include "bench/subject.h"
#include "gpipe/gpipe.h"
#include "gpipe/schedule/generators.h"

namespace gpipe::bench {
namespace {

// What the measurements should show.
constexpr double kMostRatio = 1.03;  // of large layers: (I + W) / B
constexpr double kMostMicros = 15;   // of small layers: I + W - B, per cell
constexpr char kSmall[] = "small";   // 16 layers Linear(8, 8)

Schedule whole(const Layout& layout, Checkpoint checkpoint) { return fill_drain(layout, checkpoint); }

// As whole(), with I and W in place of each B.
Schedule split(const Layout& layout, Checkpoint checkpoint) {
  auto schedule = fill_drain(layout, checkpoint);
  for (auto& list : schedule) {
    std::vector<Action> actions;
    for (auto action : list) {
      const bool splits = action.kind == Kind::B;
      if (splits) action.kind = Kind::I;
      actions.push_back(action);
      if (splits) actions.push_back({Kind::W, action.stage, action.micro_batch});
    }
    list = std::move(actions);
  }
  return schedule;
}

Subject subject_or_small(const std::string& name, int chunks) {
  if (name != kSmall) return subject(name, chunks);
  torch::nn::Sequential model;
  for (int i = 0; i < 16; ++i) model->push_back(torch::nn::Linear(8, 8));
  return {name, model, torch::randn({32 * chunks, 8}), 32};
}

// Seconds of backwards in a step.
double seconds_of_backwards(GPipe& pipe, const torch::Tensor& input) {
  const auto timeline = std::make_shared<Timeline>();
  pipe->trace(timeline);
  run_schedule(pipe, input);
  pipe->trace(nullptr);
  double seconds = 0;
  for (const auto& span : timeline->spans) {
    const auto kind = span.action.kind;
    if (kind == Kind::B || kind == Kind::I || kind == Kind::W) seconds += span.end - span.start;
  }
  return seconds;
}

void measure(const Row& row, const Options& options) {
  const auto it = subject_or_small(row.model, row.chunks);
  const auto input = it.input.detach().requires_grad_();  // a stage whose inputs need no gradient does not split
  const auto layers = static_cast<std::int64_t>(it.model->size());
  const auto make = [&](ScheduleFunction schedule) {
    return GPipe(it.model, std::vector<std::int64_t>{layers},
                 GPipeOptions().split_size(it.split_size).intraop_threads(1).schedule_function(std::move(schedule)));
  };
  auto of_whole = make(whole);
  auto of_split = make(split);
  std::vector<double> b;
  std::vector<double> i_and_w;
  for (int repeat = -1; repeat < options.repeats; ++repeat) {  // the first is a warm-up
    const auto whole_seconds = seconds_of_backwards(of_whole, input);
    const auto split_seconds = seconds_of_backwards(of_split, input);
    if (repeat < 0) continue;
    b.push_back(whole_seconds);
    i_and_w.push_back(split_seconds);
  }
  if (row.model != kSmall) {
    print(std::cout,
          {.bench = "split", .row = row, .unit = "times B", .values = quotients(i_and_w, b), .limit = kMostRatio});
    return;
  }
  std::vector<double> micros;
  for (std::size_t k = 0; k < b.size(); ++k) micros.push_back((i_and_w[k] - b[k]) * 1e6 / row.chunks);
  print(std::cout,
        {.bench = "split", .row = row, .unit = "us per cell above B", .values = micros, .limit = kMostMicros});
}

}  // namespace
}  // namespace gpipe::bench

int main(int argc, char** argv) {
  using namespace gpipe::bench;
  CLI::App app("Time of split backwards, relative to whole ones. One stage.");
  Options options{.models = {"mlp", "unet", "resnet50", kSmall},
                  .stages = {1},
                  .chunks = {4},
                  .checkpoints = {gpipe::Checkpoint::kNever},
                  .repeats = 15};
  add_flags(app, options);
  app.add_option("--model", options.models, "models to run")->check(CLI::IsMember(options.models));
  return run_program(app, argc, argv, [&] { for_each_row(options, [&](const Row& row) { measure(row, options); }); });
}
