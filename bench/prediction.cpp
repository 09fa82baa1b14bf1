// Compares predictions with measurements: the time and bytes of a step, and the choice of suggest() with the best
// candidate near it.

#include <torch/nn/modules/container/functional.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <functional>
#include <iostream>
#include <set>

#include "absl/strings/str_cat.h"
#include "balance/balance.h"
#include "balance/predict.h"
#include "balance/suggest.h"
#include "balance/trial.h"
#include "bench/measure.h"
#include "bench/subject.h"
#include "gpipe/gpipe.h"
#include "gpipe/schedules.h"

namespace gpipe::bench {
namespace {

constexpr int kSteps = 3;
constexpr double kProfileSeconds = 2;
constexpr int kNear = 4;  // layers
constexpr std::size_t kFinalists = 5;

constexpr char kForward[] = "forward";  // forward() and backward() instead of step()

// The schedules to measure, with their placements.
std::vector<Scheduling> schedulings(const std::vector<std::string>& names, int workers, int layers) {
  std::vector<Scheduling> found = {{.placement = looped_placement(workers, workers)}};
  for (auto& each : all_schedulings(workers, layers)) found.push_back(std::move(each));
  std::erase_if(found, [&](const Scheduling& each) {
    const auto name = each.schedule.empty() ? kForward : each.schedule;
    return !names.empty() && std::find(names.begin(), names.end(), name) == names.end();
  });
  return found;
}

// The layers of a subject, and its loss as one more layer, which cannot be cut off: profiles then have the loss's cost.
torch::nn::Sequential with_loss(const torch::nn::Sequential& model) {
  torch::nn::Sequential whole;
  whole->extend(*model);
  whole->push_back(torch::nn::Functional([](const torch::Tensor& output) { return output.sum().view({1}); }));
  return whole;
}

void step_of(const Candidate& way, GPipe& pipe, const torch::Tensor& input) {
  way.schedule.empty() ? step(pipe, input) : run_schedule(pipe, input);
}

GPipe make_pipe(const torch::nn::Sequential& model, const Candidate& way) {
  auto options = GPipeOptions().chunks(way.chunks).checkpoint(way.checkpoint).intraop_threads(1);
  if (!way.placement.empty()) options.placement(way.placement);
  if (!way.schedule.empty()) options.schedule(way.schedule);
  return GPipe(model, way.balance, options);
}

// Alternates profiles and steps, because the machine's speed changes with time. Compares each prediction with the steps
// before and after its profile.
void measure(Row row, const Scheduling& scheduling, const Options& options) {
  const int workers = std::exchange(row.stages, static_cast<int>(scheduling.placement.size()));
  row.schedule = scheduling.schedule;
  auto it = subject(row.model, row.chunks);
  const bool steps = !scheduling.schedule.empty();
  const RunOptions run{.chunks = row.chunks, .checkpoint = row.checkpoint, .scheduling = scheduling};
  const auto whole = steps ? with_loss(it.model) : it.model;
  const auto profile_model = [&] {
    auto of = profile(whole, it.input.narrow(0, 0, it.split_size),
                      ProfileOptions().workers(workers).seconds(kProfileSeconds));
    if (steps) of.layers.back().shares_with = static_cast<int>(of.layers.size()) - 2;
    return of;
  };
  const auto stages = static_cast<int>(scheduling.placement.size());
  auto balance = options.balance.empty() ? balance_by_time(profile_model(), stages, run) : options.balance;
  auto of_model = balance;
  if (steps && options.balance.empty()) --of_model.back();
  if (steps && !options.balance.empty()) ++balance.back();
  Candidate way;
  way.balance = of_model;
  way.chunks = row.chunks;
  way.checkpoint = row.checkpoint;
  way.schedule = scheduling.schedule;
  way.placement = scheduling.placement;
  auto pipe = make_pipe(it.model, way);
  const auto seconds = [&] { return median(interleave({[&] { step_of(way, pipe, it.input); }}, kSteps)[0]); };

  Measurement time{"prediction", row, "times the predicted seconds", {}};
  Measurement bytes{"prediction", row, "times the predicted bytes (per worker, without parameters)", {}};
  double before = seconds();
  for (int repeat = 0; repeat < options.repeats; ++repeat) {
    const auto predicted = predict(profile_model(), balance, run);
    const double after = seconds();
    time.values.push_back((before + after) / 2 / predicted.seconds);
    before = after;

    const auto timeline = std::make_shared<Timeline>();
    pipe->trace(timeline);
    step_of(way, pipe, it.input);
    pipe->trace(nullptr);
    const auto counted = timeline->peak_bytes();
    const auto expected = predicted.timeline.peak_bytes();
    for (std::size_t w = 0; w < counted.size(); ++w) {
      bytes.values.push_back(static_cast<double>(counted[w]) / static_cast<double>(expected[w]));
    }
  }
  print(std::cout, time);
  print(std::cout, bytes);
}

// Compares the choice of suggest() with the fastest of its candidates, for every schedule, number of chunks and
// checkpoint mode, and, of each schedule's best, with those that differ by one cut, moved by at most kNear layers. Runs
// all of them, then the fastest few again in turn with the choice, because the fastest of many single measurements is
// partly luck.
void sweep(const std::string& model, int workers, const Options& options) {
  auto it = subject(model, *std::max_element(options.chunks.begin(), options.chunks.end()));
  const std::vector<torch::Device> devices(workers, torch::kCPU);
  const auto suggestion =
      suggest(it.model, it.input, devices, SuggestOptions().chunks(options.chunks).checkpoints(options.checkpoints));
  const auto step_function = [&](const Candidate& way) {
    return [way, pipe = make_pipe(it.model, way), input = it.input]() mutable { step_of(way, pipe, input); };
  };
  std::vector<Measured> ways;
  std::set<std::pair<std::string, std::vector<int>>> seen;
  for (auto way : suggestion.candidates) {
    const StageCost stage(suggestion.profile_of(way));
    std::vector<std::vector<std::int64_t>> balances = {way.balance};
    if (seen.emplace(way.schedule, way.placement).second) {
      for (auto& moved : stage.near(way.balance, kNear)) balances.push_back(std::move(moved));
    }
    for (auto& balance : balances) {
      way.balance = balance;
      ways.push_back({way, median(interleave({step_function(way)}, kSteps)[0])});
    }
  }
  std::sort(ways.begin(), ways.end(), [](const Measured& a, const Measured& b) { return a.seconds < b.seconds; });
  ways.resize(std::min(ways.size(), kFinalists));
  const auto& choice = suggestion.best();
  std::vector<std::function<void()>> steps = {step_function(choice)};
  for (const auto& [way, seconds] : ways) steps.push_back(step_function(way));
  const auto times = interleave(steps, options.repeats);
  const auto best =
      *std::min_element(times.begin(), times.end(), [](const auto& a, const auto& b) { return median(a) < median(b); });
  const Row row{model, static_cast<int>(choice.placement.size()), choice.chunks, choice.checkpoint, choice.schedule};
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
  std::vector<std::string> names;
  app.add_option("--schedule", names, absl::StrCat("schedules to run, or ", kForward, "; default: all"))
      ->check([](const std::string& name) {
        if (name != kForward) gpipe::schedule_rule(name);
        return "";
      });
  bool sweeps = false;
  app.add_flag("--sweep", sweeps, "instead: time of suggest()'s choice, relative to the best candidate near it")
      ->excludes("--balance");
  return run_program(app, argc, argv, [&] {
    if (!sweeps) {
      return for_each_row(options, [&](const Row& each) {
        const auto layers = static_cast<int>(subject(each.model, each.chunks).model->size());
        for (const auto& scheduling : schedulings(names, each.stages, layers)) measure(each, scheduling, options);
      });
    }
    for (const auto& model : options.models) {
      for (const int workers : options.stages) sweep(model, workers, options);
    }
  });
}
