// What the library says of a model before it runs, beside what is: time and bytes of a step from a profile; and the
// choice of suggest() beside the best of all that stand near it.

#include <torch/utils.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <iostream>
#include <map>

#include "balance/balance.h"
#include "balance/predict.h"
#include "balance/suggest.h"
#include "bench/measure.h"
#include "bench/subject.h"
#include "gpipe/gpipe.h"

namespace gpipe::bench {
namespace {

constexpr int kSteps = 5;

GPipe make_pipe(const torch::nn::Sequential& model, const std::vector<std::int64_t>& balance, int chunks,
                Checkpoint checkpoint) {
  return GPipe(model, balance, GPipeOptions().chunks(chunks).checkpoint(checkpoint).intraop_threads(1));
}

// Profile, prediction and steps in turn: the machine is not the same from minute to minute.
void measure(const Row& row, const std::vector<std::int64_t>& wanted, const Options& options) {
  Measurement time{"prediction", row, "times the predicted seconds", {}, {}};
  Measurement bytes{"prediction", row, "times the predicted bytes (of each stage)", {}, {}};
  for (int repeat = 0; repeat < options.repeats; ++repeat) {
    auto it = subject(row.model, row.chunks);
    const auto of_model =
        profile(it.model, it.input.narrow(0, 0, it.split_size), ProfileOptions().workers(row.stages).seconds(5));
    const RunOptions run{.chunks = row.chunks, .checkpoint = row.checkpoint};
    const auto balance = wanted.empty() ? balance_by_time(of_model, row.stages, run) : wanted;
    const auto predicted = predict(of_model, balance, run);

    auto pipe = make_pipe(it.model, balance, row.chunks, row.checkpoint);
    const auto times = interleave({[&] { step(pipe, it.input); }}, kSteps);
    time.values.push_back(median(times[0]) / predicted.seconds);

    const auto timeline = std::make_shared<Timeline>();
    pipe->trace(timeline);
    step(pipe, it.input);
    const StageCost stage(of_model);
    int first = 0;
    for (int s = 0; s < row.stages; ++s) {
      const int end = first + static_cast<int>(balance[s]);
      const auto counted = timeline->peak_bytes()[s] + stage.static_bytes(first, end);
      bytes.values.push_back(static_cast<double>(counted) / static_cast<double>(predicted.bytes[s]));
      first = end;
    }
  }
  print(std::cout, time);
  print(std::cout, bytes);
}

// The choice of suggest(), over the fastest of all cuts that differ by at most four layers.
void sweep(const std::string& model, int stages, const Options& options) {
  auto it = subject(model, *std::max_element(options.chunks.begin(), options.chunks.end()));
  const std::vector<torch::Device> devices(stages, torch::kCPU);
  const auto suggestion = suggest(it.model, it.input, devices, SuggestOptions().chunks(options.chunks));
  const auto& choice = suggestion.best();
  std::map<std::pair<int, Checkpoint>, std::vector<std::int64_t>> centres;
  for (const auto& candidate : suggestion.candidates) {
    centres[{candidate.chunks, candidate.checkpoint}] = candidate.balance;
  }
  const auto seconds_of = [&](const std::vector<std::int64_t>& balance, int chunks, Checkpoint checkpoint) {
    auto pipe = make_pipe(it.model, balance, chunks, checkpoint);
    return median(interleave({[&] { step(pipe, it.input); }}, options.repeats)[0]);
  };
  double best = seconds_of(choice.balance, choice.chunks, choice.checkpoint);
  std::vector<double> chosen = {best};
  for (const auto& [key, centre] : centres) {
    for (int shift = -4; shift <= 4; ++shift) {
      auto balance = centre;
      balance.front() += shift;
      balance.back() -= shift;
      if (balance.front() < 1 || balance.back() < 1) continue;
      best = std::min(best, seconds_of(balance, key.first, key.second));
    }
    chosen.push_back(seconds_of(choice.balance, choice.chunks, choice.checkpoint));
  }
  for (double& seconds : chosen) seconds /= best;
  print(std::cout, {"suggestion", {model, stages, choice.chunks, choice.checkpoint}, "times the best", chosen, {}});
}

}  // namespace
}  // namespace gpipe::bench

int main(int argc, char** argv) {
  using namespace gpipe::bench;
  CLI::App app("What is predicted of a step, beside what is measured.");
  Options options{
      .models = kSubjects, .chunks = {2, 4, 8}, .checkpoints = {gpipe::Checkpoint::kNever, gpipe::Checkpoint::kAlways}};
  add_flags(app, options);
  std::vector<std::int64_t> balance;
  add_balance_flag(app, balance);
  bool sweeps = false;
  app.add_flag("--sweep", sweeps, "instead: the choice of suggest() over the best of the cuts near it");
  CLI11_PARSE(app, argc, argv);
  if (!balance.empty()) options.stages = {static_cast<int>(balance.size())};
  torch::set_num_threads(1);
  if (!sweeps) {
    for_each_row(options, [&](const Row& row) { measure(row, balance, options); });
    return 0;
  }
  for (const auto& model : options.models) {
    for (const int stages : options.stages) sweep(model, stages, options);
  }
}
