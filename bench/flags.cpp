#include <CLI/CLI.hpp>
#include <string>
#include <utility>

#include "bench/measure.h"
#include "gpipe/runtime/memory_reuse.h"

namespace gpipe::bench {

void add_flags(CLI::App& app, Options& options) {
  app.option_defaults()->always_capture_default()->delimiter(',');
  app.add_option("--stages", options.stages)->check(CLI::PositiveNumber);
  app.add_option("--chunks", options.chunks, "micro-batches of a mini-batch")->check(CLI::PositiveNumber);
  app.add_option("--repeats", options.repeats)->check(CLI::PositiveNumber);
  std::vector<std::string> names;
  for (const auto checkpoint : options.checkpoints) names.push_back(to_string(checkpoint));
  app.add_option("--checkpoint", options.checkpoints, "never, except_last, always")
      ->transform(CLI::CheckedTransformer(checkpoints()))
      ->default_str(CLI::detail::join(names));
  app.add_flag_callback(
      "--reuse", [] { reuse_cpu_memory(); }, "keep the memory of tensors for the next");
}

void add_model_flag(CLI::App& app, Options& options) {
  app.add_option("--model", options.models)->check(CLI::IsMember(options.models));
}

void add_steps_flag(CLI::App& app, Options& options) {
  app.add_flag("--steps-only", options.steps_only, "print the figure of each step of the pipeline, and no other");
}

void add_balance_flag(CLI::App& app, Options& options) {
  app.add_option_function<std::vector<std::int64_t>>(
         "--balance",
         [&options](const auto& balance) {
           options.balance = balance;
           options.stages = {static_cast<int>(balance.size())};
         },
         "layers of each stage; default: cut by measured times")
      ->always_capture_default(false)
      ->excludes("--stages");
}

void add_short_flag(CLI::App& app, Options& options, std::vector<Checkpoint> checkpoints) {
  const auto shorten = [&options, checkpoints = std::move(checkpoints)] {
    options.repeats = 3;
    options.chunks = {4};
    options.checkpoints = checkpoints;
  };
  app.add_flag_callback("--short", shorten, "some of it, in about a minute");
}

}  // namespace gpipe::bench
