// gpipe-balance cut: the best balance for a number of chunks and a checkpoint mode.

#include <CLI/CLI.hpp>
#include <iostream>

#include "balance/cut.h"
#include "balance/predict.h"
#include "balance/report.h"
#include "examples/gpipe_balance/json.h"
#include "examples/gpipe_balance/model.h"
#include "examples/gpipe_balance/verbs.h"

namespace gpipe::examples::balance {
namespace {

void add_flags(CLI::App& app, Options& options) {
  add_chunks_flag(app, options);
  add_bandwidth_flag(app, options);
  add_schedule_flags(app, options);
  add_layers_flag(app, options);
  app.add_option("--profile", options.profile, "file written by 'profile --output'; use it instead of measuring")
      ->check(CLI::ExistingFile)
      ->always_capture_default(false);
  app.add_option("--checkpoint", options.checkpoint, "never, except_last or always")
      ->transform(CLI::CheckedTransformer(checkpoints()))
      ->default_str(to_string(options.checkpoint));
  app.add_option("--by", options.by, "what to equalise between stages: time or size")
      ->check(CLI::IsMember({"time", "size"}));
}

int run(const Options& options) {
  const auto profile = profile_of(options, options.chunks);
  const auto run = options.run(options.chunks, options.checkpoint);
  const auto balance = options.by == "time" ? balance_by_time(profile, options.stages, run)
                                            : balance_by_size(profile, options.stages, run);
  const auto prediction = predict(profile, balance, run);
  if (options.json) {
    std::cout << Json{{"balance", balance},          {"seconds", prediction.seconds},     {"bubble", prediction.bubble},
                      {"stages", prediction.stages}, {"placement", prediction.placement}, {"bytes", prediction.bytes}}
              << "\n";
    return 0;
  }
  if (options.layers) std::cout << profile_table(profile, balance) << "\n";
  std::cout << "balance " << balance_to_text(balance) << "; " << run.chunks << " chunks, checkpoint "
            << to_string(run.checkpoint) << ":\n"
            << prediction_table(prediction);
  return 0;
}

}  // namespace

Verb cut_verb() {
  return {"cut", "the balance whose stages are most equal in time or memory, and its prediction", add_flags, run};
}

}  // namespace gpipe::examples::balance
