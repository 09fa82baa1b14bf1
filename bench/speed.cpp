// Speed-up of a pipeline with one core per stage over the unpartitioned model on one core. Also prints the bound: the
// speed-up of the simulated program, in which each action takes as long as while the other stages run and nothing else
// takes time.

#include <CLI/CLI.hpp>
#include <iostream>
#include <memory>
#include <stdexcept>

#include "balance/balance.h"
#include "balance/trial.h"
#include "bench/measure.h"
#include "bench/subject.h"
#include "gpipe/gpipe.h"
#include "gpipe/ranks.h"
#include "gpipe/simulator.h"

namespace gpipe::bench {
namespace {

void measure(const Row& row, const Options& options, const std::shared_ptr<Ranks>& ranks) {
  if (ranks && (!options.steps_only || options.balance.empty())) {
    throw std::invalid_argument("--over-ranks needs --steps-only and --balance");
  }
  torch::manual_seed(0);
  auto it = subject(row.model, row.chunks);
  auto balance = options.balance;
  if (balance.empty()) balance = balance_by_time(row.stages, it.model, Value(it.input.narrow(0, 0, it.split_size)));
  if (ranks) {
    const auto [begin, end] = ranks->part(it.input.size(0));
    it.input = it.input.slice(0, begin, end);
  }
  auto pipe = make_pipe(it, balance, row, ranks);
  if (options.steps_only) {
    const auto times = interleave({[&] { step(pipe, it.input, row); }}, options.repeats);
    if (ranks && ranks->rank() != 0) return;
    return print_steps(std::cout, row, "seconds", times[0]);
  }
  // More micro-batches of the same size, so that the stages overlap.
  const auto longer = torch::cat(std::vector<torch::Tensor>((3 + row.chunks) / row.chunks, it.input));
  auto observed = make_pipe(it, balance, row);
  step(observed, longer, row);
  const auto timeline = std::make_shared<Timeline>();
  observed->trace(timeline);
  const auto times = interleave(
      {[&] { step(it.model, it.input); }, [&] { step(pipe, it.input, row); }, [&] { step(observed, longer, row); }},
      options.repeats);
  Measurement line{"speed", row, "times one core", quotients(times[0], times[1])};
  line.bound = median(times[0]) / simulate(*pipe->program(row.chunks), costs_of(*timeline, row.stages)).makespan;
  print(std::cout, line);
}

}  // namespace
}  // namespace gpipe::bench

int main(int argc, char** argv) {
  using namespace gpipe::bench;
  CLI::App app("Speed of stages on one core each, relative to the unpartitioned model on one core, and its bound.");
  Options options{.models = kPeerSubjects,
                  .chunks = {1, 2, 4, 8, 16},
                  .checkpoints = {gpipe::Checkpoint::kNever, gpipe::Checkpoint::kAlways}};
  add_flags(app, options);
  add_model_flag(app, options);
  add_steps_flag(app, options);
  add_stages_flag(app, options);
  add_balance_flag(app, options);
  add_schedule_flag(app, options);
  add_ranks_flag(app, options);
  app.add_option("--replicas", options.replicas, "divide the processes among so many pipelines; needs --over-ranks")
      ->capture_default_str()
      ->needs("--over-ranks")
      ->check(CLI::PositiveNumber);
  add_short_flag(app, options, {gpipe::Checkpoint::kNever});
  return run_program(app, argc, argv, [&] {
    const auto ranks =
        options.over_ranks ? gpipe::Ranks::from_environment(gpipe::RanksOptions().replicas(options.replicas)) : nullptr;
    for_each_row(options, [&](const Row& row) { measure(row, options, ranks); });
  });
}
