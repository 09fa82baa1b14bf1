#pragma once

#include <CLI/App.hpp>

#include "examples/gpipe_balance/options.h"

namespace gpipe::examples::balance {

/// A subcommand of the program.
struct Verb {
  const char* name;
  const char* help;
  /// Adds the verb's own flags.
  void (*add_flags)(CLI::App& app, Options& options);
  /// Runs the verb and returns the exit code.
  int (*run)(const Options& options);
};

Verb profile_verb();
Verb cut_verb();
Verb suggest_verb();
Verb sweep_verb();

}  // namespace gpipe::examples::balance
