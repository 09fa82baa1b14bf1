// Compares step() under each schedule with its simulation: the time of a step and the peak bytes of the workers. The
// costs in the simulation come from other runs: times from traced steps, bytes from a profile of the model with its
// loss. Also runs the unpartitioned model with an intra-op thread per worker.

#include <torch/nn/modules/container/functional.h>
#include <torch/utils.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <iostream>

#include "balance/cut.h"
#include "balance/profiler.h"
#include "balance/stage_cost.h"
#include "balance/trial.h"
#include "bench/measure.h"
#include "bench/subject.h"
#include "gpipe/gpipe.h"
#include "gpipe/simulator.h"

namespace gpipe::bench {
namespace {

constexpr int kWorkers = 2;
constexpr double kProfileSeconds = 2;

// The schedules to measure, with their stages per worker.
const std::vector<std::pair<std::string, int>> kSchedules = {
    {"gpipe", 1},  {"1f1b", 1},  {"looped_bfs", 2},     {"interleaved_1f1b", 2},
    {"zb_h1", 1},  {"zb_h2", 1}, {"interleaved_zb", 2}, {"zb_v", 2},
    {"v_half", 2}, {"v_min", 2}, {"dualpipe_v", 2},     {"greedy", 1}};

// What the measurements should show.
constexpr double kMostSeconds = 1.05;  // measured / simulated
constexpr double kMostBytes = 0.3;     // 1f1b's peak / gpipe's, with these chunks and this checkpoint mode
constexpr int kChunksOfMostBytes = 16;
constexpr Checkpoint kCheckpointOfMostBytes = Checkpoint::kNever;

// A pipeline under one schedule.
struct Contender {
  Row row;
  std::vector<CellBytes> bytes;  // per stage
  GPipe pipe{nullptr};
  std::vector<std::shared_ptr<Timeline>> traces;  // one per traced step

  void traced_step(const torch::Tensor& input) {
    pipe->trace(traces.emplace_back(std::make_shared<Timeline>()));
    step(pipe, input, row);
    pipe->trace(nullptr);
  }

  Simulation simulated() const {
    Timeline all{traces.front()->workers, traces.front()->edges, {}};
    for (const auto& trace : traces) all.spans.insert(all.spans.end(), trace->spans.begin(), trace->spans.end());
    auto costs = costs_of(all, row.stages);
    costs.bytes = bytes;
    return simulate(*pipe->program(row.chunks), costs);
  }

  // The peak bytes of the worker that has most, per traced step.
  std::vector<double> peaks() const {
    std::vector<double> peaks;
    for (const auto& trace : traces) peaks.push_back(largest(trace->peak_bytes()));
    return peaks;
  }

  static double largest(const std::vector<std::int64_t>& bytes) {
    return static_cast<double>(*std::max_element(bytes.begin(), bytes.end()));
  }
};

// The model with the loss as one more layer, which cannot be cut off.
Profile profile_with_loss(const Subject& it) {
  torch::nn::Sequential whole;
  whole->extend(*it.model);
  whole->push_back(torch::nn::Functional([](const torch::Tensor& output) { return output.sum().view({1}); }));
  auto of_whole =
      profile(whole, it.input.narrow(0, 0, it.split_size), ProfileOptions().workers(kWorkers).seconds(kProfileSeconds));
  of_whole.layers.back().shares_with = static_cast<int>(of_whole.layers.size()) - 2;
  return of_whole;
}

Contender make_contender(const Subject& it, const Profile& of_whole, Row row, const std::string& schedule,
                         int stages_per_worker) {
  row.schedule = schedule;
  row.stages_per_worker = stages_per_worker;
  row.stages = kWorkers * row.stages_per_worker;
  const RunOptions run{.chunks = row.chunks, .checkpoint = row.checkpoint};
  auto balance = balance_by_time(of_whole, row.stages, run);
  Contender contender;
  contender.row = row;
  contender.bytes = StageCost(of_whole).costs(balance, run).bytes;
  --balance.back();  // the loss
  contender.pipe = make_pipe(it, balance, row);
  return contender;
}

// A step of the whole mini-batch without a pipeline and without checkpointing.
void step_on_threads(Subject& it, int threads) {
  torch::set_num_threads(threads);
  step(it.model, it.input);
  torch::set_num_threads(1);
}

// Counted / simulated, per traced step and worker.
std::vector<double> byte_ratios(const Contender& contender, const Simulation& simulated) {
  const auto expected = simulated.timeline.peak_bytes();
  std::vector<double> ratios;
  for (const auto& trace : contender.traces) {
    const auto counted = trace->peak_bytes();
    for (int w = 0; w < kWorkers; ++w) {
      ratios.push_back(static_cast<double>(counted[w]) / static_cast<double>(expected[w]));
    }
  }
  return ratios;
}

// Runs a step and a traced step of each schedule in turn.
void measure(const Row& row, const std::vector<std::string>& chosen, const Options& options) {
  auto it = subject(row.model, row.chunks);
  const auto of_whole = profile_with_loss(it);
  std::vector<Contender> contenders;
  for (const auto& [name, stages_per_worker] : kSchedules) {
    if (std::find(chosen.begin(), chosen.end(), name) == chosen.end()) continue;
    contenders.push_back(make_contender(it, of_whole, row, name, stages_per_worker));
  }
  std::vector<std::function<void()>> steps;
  for (auto& each : contenders) {
    step(each.pipe, it.input, each.row);
    steps.emplace_back([&] { step(each.pipe, it.input, each.row); });
    steps.emplace_back([&] { each.traced_step(it.input); });
  }
  steps.emplace_back([&] { step_on_threads(it, kWorkers); });
  const auto times = interleave(steps, options.repeats);
  const auto first = "times the speed of " + contenders.front().row.schedule;
  print(std::cout, {"schedules", row, first + ", of the unpartitioned model on two intra-op threads",
                    quotients(times.front(), times.back())});
  const Contender* gpipe = nullptr;
  double simulated_first = 0;
  for (std::size_t i = 0; i < contenders.size(); ++i) {
    auto& each = contenders[i];
    each.traces.erase(each.traces.begin());  // the warm-up of interleave()
    const auto& seconds = times[2 * i];
    const auto simulated = each.simulated();
    if (i == 0) simulated_first = simulated.makespan;
    const std::vector<double> makespans(seconds.size(), simulated.makespan);
    print(std::cout, {.bench = "schedules",
                      .row = each.row,
                      .unit = "times the simulated seconds",
                      .values = quotients(seconds, makespans),
                      .limit = kMostSeconds});
    print(std::cout, {.bench = "schedules",
                      .row = each.row,
                      .unit = first,
                      .values = quotients(times[0], seconds),
                      .bound = simulated_first / simulated.makespan});
    print(std::cout,
          {"schedules", each.row, "times the simulated peak bytes (per worker)", byte_ratios(each, simulated)});
    if (each.row.schedule == "gpipe") gpipe = &each;
    if (each.row.schedule != "1f1b" || gpipe == nullptr) continue;
    Measurement of_gpipe{"schedules", each.row, "times gpipe's peak bytes (of the worker that has most)",
                         quotients(each.peaks(), gpipe->peaks())};
    if (row.chunks == kChunksOfMostBytes && row.checkpoint == kCheckpointOfMostBytes) of_gpipe.limit = kMostBytes;
    print(std::cout, of_gpipe);
  }
}

}  // namespace
}  // namespace gpipe::bench

int main(int argc, char** argv) {
  using namespace gpipe::bench;
  CLI::App app("Measured time and bytes of step() under each schedule, relative to the simulation. Two workers.");
  Options options{.models = kPeerSubjects,
                  .chunks = {4, 8, 16},
                  .checkpoints = {gpipe::Checkpoint::kNever, gpipe::Checkpoint::kAlways},
                  .repeats = 5};
  std::vector<std::string> schedules;
  for (const auto& [name, stages_per_worker] : kSchedules) schedules.push_back(name);
  add_flags(app, options);
  add_model_flag(app, options);
  app.add_option("--schedule", schedules, "schedules to run")->check(CLI::IsMember(schedules));
  return run_program(app, argc, argv,
                     [&] { for_each_row(options, [&](const Row& row) { measure(row, schedules, options); }); });
}
