// gpipe-balance: profiles a model, partitions it, and predicts the time and memory of a step.

#include <CLI/CLI.hpp>

#include "examples/common/pipeline_options.h"
#include "examples/gpipe_balance/verbs.h"

int main(int argc, char** argv) {
  using namespace gpipe::examples::balance;
  CLI::App app("Profiles a model, partitions it into stages, and predicts the time and memory of a step.",
               "gpipe-balance");
  app.require_subcommand(1);
  app.option_defaults()->always_capture_default();
  Options options;
  int (*run)(const Options&) = nullptr;
  for (const auto& verb : {profile_verb(), cut_verb(), suggest_verb(), sweep_verb()}) {
    auto* command = app.add_subcommand(verb.name, verb.help);
    // If a flag is given twice, the last one counts.
    command->option_defaults()->always_capture_default()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
    command->callback([&run, function = verb.run] { run = function; });
    add_common_flags(*command, options);
    verb.add_flags(*command, options);
  }
  return gpipe::examples::run_program(app, argc, argv, [&] { return run(options); });
}
