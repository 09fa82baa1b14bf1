#include "examples/common/options.h"

#include <c10/util/Exception.h>

#include <CLI/CLI.hpp>
#include <csignal>
#include <iostream>
#include <system_error>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "gpipe/schedules.h"

namespace gpipe::examples {
namespace {

// Prints in one write, because ranks may share a terminal.
void print_error(const std::string& text) { std::cerr << absl::StrCat("error: ", text, "\n"); }

}  // namespace

CLI::Validator in_range(double low, double high) {
  return {[=](const std::string& text) -> std::string {
            double value = 0;
            const bool fits = absl::SimpleAtod(text, &value) && value >= low && value <= high;
            return fits ? "" : absl::StrCat("must be a number from ", low, " to ", high, ", but is '", text, "'");
          },
          ""};
}

void add_pipeline_options(CLI::App& app, PipelineOptions& options) {
  // The last of repeated flags counts, so that a script's own can be overridden.
  app.option_defaults()->always_capture_default()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  app.get_formatter()->column_width(34);
  app.add_option("-b,--batch-size", options.batch_size, "samples per mini-batch")->check(in_range(1));
  app.add_option("--stages", options.stages, "number of stages, of equal measured time")->check(in_range(1, 1024));
  const auto list = [&](const char* flag, auto& values, const char* text) {
    return app.add_option(flag, values, text)
        ->delimiter(',')
        ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
        ->always_capture_default(false);
  };
  list("--balance", options.layers, "layers per stage, such as 20,35, instead of --stages")
      ->check(in_range(1))
      ->excludes("--stages");
  list("--devices", options.devices,
       "one per worker, such as cuda:0,cuda:1, or one for all; by default the GPUs, or the CPU");
  app.add_option("--chunks", options.chunks, "micro-batches per mini-batch")->check(in_range(1));
  app.final_callback([&options] {
    if (!options.layers.empty()) options.stages = static_cast<int>(options.layers.size());
  });
}

void add_training_options(CLI::App& app, TrainingOptions& options) {
  add_pipeline_options(app, options);
  std::vector<std::string> names;
  for (const auto& rule : schedule_rules()) names.emplace_back(rule.name);
  app.add_option("--schedule", options.schedule,
                 "order of forwards and backwards on each worker: " + absl::StrJoin(names, ", ") +
                     ", auto, or @FILE, with one line of actions per worker (see python -m gpipe draw)");
  app.add_option_function<std::string>(
         "--checkpoint", [&](const std::string& name) { options.checkpoint = checkpoints().at(name); },
         "which micro-batches recompute their activations instead of storing them: never, except_last, always")
      ->check(CLI::IsMember({"never", "except_last", "always"}))
      ->default_str(to_string(options.checkpoint));
  app.add_option("-e,--epochs", options.epochs, "passes over the training images")->check(in_range(1));
  app.add_option("-l,--learning-rate", options.learning_rate, "of Adam at the start; falls towards 0 along a cosine")
      ->check(in_range(1e-12, 1e3));
  app.add_flag("--amp", options.amp, "compute in bfloat16 where that is safe (autocast)");
  app.add_option("--seed", options.seed, "seed of weights, order and drawn data");
  app.add_option("-o,--output", options.output, "folder for the output files");
  app.add_option("--resume", options.resume,
                 "snapshot to continue from, as if the run had never stopped; --epochs can be higher. auto: the latest "
                 "one in --output, or a new training if there is none")
      ->always_capture_default(false);
  app.add_flag("--watch", options.watch, "show what the workers do in each step");
  app.add_option("--snapshot-every", options.snapshot_every,
                 "write the latest snapshot also after every so many steps of an epoch; 0: only after each epoch")
      ->check(in_range(0));
}

int run_program(CLI::App& app, int argc, char** argv, const std::function<int()>& run) {
  std::signal(SIGXFSZ, SIG_IGN);  // so that writing too large a file is an error
  app.failure_message(
      [](const CLI::App*, const CLI::Error& error) { return absl::StrCat("error: ", error.what(), "\n"); });
  try {
    app.parse(argc, argv);
    const int code = run();
    if (std::cout.flush()) return code;
    print_error("cannot write to standard output");
  } catch (const CLI::ParseError& error) {
    return app.exit(error);
  } catch (const c10::Error& error) {
    print_error(error.what_without_backtrace());
  } catch (const std::system_error& error) {
    const bool thread = error.code() == std::errc::resource_unavailable_try_again;
    print_error(absl::StrCat(thread ? "cannot start a thread: " : "", error.what()));
  } catch (const std::exception& error) {
    print_error(error.what());
  }
  return 1;
}

}  // namespace gpipe::examples
