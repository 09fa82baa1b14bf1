#include <c10/util/Exception.h>
#include <torch/utils.h>

#include <CLI/App.hpp>
#include <exception>
#include <iostream>

#include "bench/measure.h"

namespace gpipe::bench {

int run_program(CLI::App& app, int argc, char** argv, const std::function<void()>& measure) {
  try {
    app.parse(argc, argv);
    torch::set_num_threads(1);
    measure();
    return 0;
  } catch (const CLI::ParseError& error) {
    return app.exit(error);
  } catch (const c10::Error& error) {
    std::cerr << "error: " << error.what_without_backtrace() << std::endl;
  } catch (const std::exception& error) {
    std::cerr << "error: " << error.what() << std::endl;
  }
  return 1;
}

}  // namespace gpipe::bench
