#include <CLI/CLI.hpp>
#include <string>
#include <utility>

#include "bench/measure.h"
#include "gpipe/schedules.h"

namespace gpipe::bench {

void add_flags(CLI::App& app, Options& options) {
  app.option_defaults()->always_capture_default()->delimiter(',');
  app.add_option("--chunks", options.chunks, "numbers of micro-batches per mini-batch")->check(CLI::PositiveNumber);
  app.add_option("--repeats", options.repeats, "measured repeats per row")->check(CLI::PositiveNumber);
  std::vector<std::string> names;
  for (const auto checkpoint : options.checkpoints) names.push_back(to_string(checkpoint));
  app.add_option("--checkpoint", options.checkpoints, "checkpoint modes: never, except_last, always")
      ->transform(CLI::CheckedTransformer(checkpoints()))
      ->default_str(CLI::detail::join(names));
}

void add_model_flag(CLI::App& app, Options& options) {
  app.add_option("--model", options.models, "models to run")->check(CLI::IsMember(options.models));
}

void add_stages_flag(CLI::App& app, Options& options) {
  app.add_option("--stages", options.stages, "numbers of stages")->check(CLI::PositiveNumber);
}

void add_schedule_flag(CLI::App& app, Options& options) {
  std::vector<std::string> names;
  for (const auto& rule : schedule_rules()) names.emplace_back(rule.name);
  app.add_option("--schedule", options.schedule, "run step() with this schedule instead of forward() and backward()")
      ->check(CLI::IsMember(names));
  app.add_option("--stages-per-worker", options.stages_per_worker, "stages on each worker")->check(CLI::PositiveNumber);
}

void add_steps_flag(CLI::App& app, Options& options) {
  app.add_flag("--steps-only", options.steps_only, "print only the result of each step of the pipeline");
}

void add_ranks_flag(CLI::App& app, Options& options) {
  app.add_flag(
      "--over-ranks", options.over_ranks,
      "run over the processes that torchrun has started; rank 0 prints; needs --steps-only, and in speed --balance");
}

void add_balance_flag(CLI::App& app, Options& options) {
  app.add_option_function<std::vector<std::int64_t>>(
         "--balance",
         [&options](const auto& balance) {
           options.balance = balance;
           options.stages = {static_cast<int>(balance.size())};
         },
         "layers per stage; default: balanced by measured times")
      ->always_capture_default(false)
      ->excludes("--stages");
}

void add_short_flag(CLI::App& app, Options& options, std::vector<Checkpoint> checkpoints) {
  const auto shorten = [&options, checkpoints = std::move(checkpoints)] {
    options.repeats = 3;
    options.chunks = {4};
    options.checkpoints = checkpoints;
  };
  app.add_flag_callback("--short", shorten, "fewer rows and repeats, in about a minute");
}

}  // namespace gpipe::bench
