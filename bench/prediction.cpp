// Compares predictions with measurements: the time and bytes of a step, and the choice of suggest() with the best
// candidate near it.

#include <CLI/CLI.hpp>
#include <algorithm>
#include <functional>
#include <iostream>

#include "balance/balance.h"
#include "balance/predict.h"
#include "balance/suggest.h"
#include "balance/trial.h"
#include "bench/measure.h"
#include "bench/subject.h"
#include "gpipe/gpipe.h"

namespace gpipe::bench {
namespace {

constexpr int kSteps = 3;
constexpr double kProfileSeconds = 2;
constexpr int kNear = 4;  // layers
constexpr std::size_t kFinalists = 5;

GPipe make_pipe(const torch::nn::Sequential& model, const std::vector<std::int64_t>& balance, int chunks,
                Checkpoint checkpoint) {
  return GPipe(model, balance, GPipeOptions().chunks(chunks).checkpoint(checkpoint).intraop_threads(1));
}

// Alternates profiles and steps, because the machine's speed changes with time. Compares each prediction with the steps
// before and after its profile.
void measure(const Row& row, const Options& options) {
  auto it = subject(row.model, row.chunks);
  const RunOptions run{.chunks = row.chunks, .checkpoint = row.checkpoint};
  const auto profile_model = [&] {
    return profile(it.model, it.input.narrow(0, 0, it.split_size),
                   ProfileOptions().workers(row.stages).seconds(kProfileSeconds));
  };
  const auto balance = options.balance.empty() ? balance_by_time(profile_model(), row.stages, run) : options.balance;
  auto pipe = make_pipe(it.model, balance, row.chunks, row.checkpoint);
  const auto seconds = [&] { return median(interleave({[&] { step(pipe, it.input); }}, kSteps)[0]); };

  Measurement time{"prediction", row, "times the predicted seconds", {}};
  Measurement bytes{"prediction", row, "times the predicted bytes (per stage, without parameters)", {}};
  double before = seconds();
  for (int repeat = 0; repeat < options.repeats; ++repeat) {
    const auto predicted = predict(profile_model(), balance, run);
    const double after = seconds();
    time.values.push_back((before + after) / 2 / predicted.seconds);
    before = after;

    const auto timeline = std::make_shared<Timeline>();
    pipe->trace(timeline);
    step(pipe, it.input);
    pipe->trace(nullptr);
    const auto counted = timeline->peak_bytes();
    const auto expected = predicted.timeline.peak_bytes();
    for (int s = 0; s < row.stages; ++s) {
      bytes.values.push_back(static_cast<double>(counted[s]) / static_cast<double>(expected[s]));
    }
  }
  print(std::cout, time);
  print(std::cout, bytes);
}

// Compares the choice of suggest() with the fastest of all candidates that differ by one cut, moved by at most kNear
// layers, for every number of chunks and checkpoint mode. Runs all of them, then the fastest few again in turn with the
// choice, because the fastest of many single measurements is partly luck.
void sweep(const std::string& model, int stages, const Options& options) {
  auto it = subject(model, *std::max_element(options.chunks.begin(), options.chunks.end()));
  const std::vector<torch::Device> devices(stages, torch::kCPU);
  const auto suggestion =
      suggest(it.model, it.input, devices, SuggestOptions().chunks(options.chunks).checkpoints(options.checkpoints).scheduling({}));
  const auto step_of = [&](const Candidate& way) {
    return [pipe = make_pipe(it.model, way.balance, way.chunks, way.checkpoint), input = it.input]() mutable {
      step(pipe, input);
    };
  };
  std::vector<Measured> ways;
  for (auto way : suggestion.candidates) {
    const StageCost stage(suggestion.profile_of(way));
    auto balances = stage.near(way.balance, kNear);
    balances.push_back(way.balance);
    for (auto& balance : balances) {
      way.balance = balance;
      ways.push_back({way, median(interleave({step_of(way)}, kSteps)[0])});
    }
  }
  std::sort(ways.begin(), ways.end(), [](const Measured& a, const Measured& b) { return a.seconds < b.seconds; });
  ways.resize(std::min(ways.size(), kFinalists));
  const auto& choice = suggestion.best();
  std::vector<std::function<void()>> steps = {step_of(choice)};
  for (const auto& [way, seconds] : ways) steps.push_back(step_of(way));
  const auto times = interleave(steps, options.repeats);
  const auto best =
      *std::min_element(times.begin(), times.end(), [](const auto& a, const auto& b) { return median(a) < median(b); });
  const Row row{model, stages, choice.chunks, choice.checkpoint};
  print(std::cout, {"suggestion", row, "times the best", quotients(times[0], best)});
}

}  // namespace
}  // namespace gpipe::bench

int main(int argc, char** argv) {
  using namespace gpipe::bench;
  CLI::App app("Measured time and bytes of a step, relative to the predictions.");
  Options options{
      .models = kSubjects, .chunks = {2, 4, 8}, .checkpoints = {gpipe::Checkpoint::kNever, gpipe::Checkpoint::kAlways}};
  add_flags(app, options);
  add_model_flag(app, options);
  add_stages_flag(app, options);
  add_balance_flag(app, options);
  bool sweeps = false;
  app.add_flag("--sweep", sweeps, "instead: time of suggest()'s choice, relative to the best candidate near it")
      ->excludes("--balance");
  return run_program(app, argc, argv, [&] {
    if (!sweeps) return for_each_row(options, [&](const Row& row) { measure(row, options); });
    for (const auto& model : options.models) {
      for (const int stages : options.stages) sweep(model, stages, options);
    }
  });
}
