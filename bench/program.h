#pragma once

#include <c10/util/Exception.h>
#include <torch/utils.h>

#include <CLI/CLI.hpp>
#include <exception>
#include <functional>
#include <iostream>
#include <string>

namespace gpipe::bench {

/// Prints in one write, because ranks may share a terminal.
inline void print_error(const std::string& text) { std::cerr << "error: " + text + "\n"; }

/// A program's main(): parses the command line, gives PyTorch one thread and calls `run`. Returns the exit code. Prints
/// errors as one line on standard error.
inline int run_program(CLI::App& app, int argc, char** argv, const std::function<void()>& run) {
  app.failure_message([](const CLI::App*, const CLI::Error& error) { return std::string(error.what()) + "\n"; });
  try {
    app.parse(argc, argv);
    torch::set_num_threads(1);
    run();
    return 0;
  } catch (const CLI::ParseError& error) {
    return app.exit(error);
  } catch (const c10::Error& error) {
    print_error(error.what_without_backtrace());
  } catch (const std::exception& error) {
    print_error(error.what());
  }
  return 1;
}

}  // namespace gpipe::bench
