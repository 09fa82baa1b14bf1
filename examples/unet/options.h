#pragma once

#include <torch/types.h>

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "gpipe/schedule/generators.h"

namespace gpipe::unet {

/// What the command line of the training program says.
struct Options {
  std::string data = "synthetic";  ///< a directory in Carvana's layout, or "synthetic"
  std::filesystem::path output = "out/unet";
  int samples = 400;  ///< of the synthetic set
  int epochs = 24;
  std::int64_t batch_size = 8;
  double learning_rate = 5e-3;
  double scale = 0.5;
  double validation = 10;  ///< percent
  std::uint64_t seed = 0;
  int workers = 1;
  std::int64_t depth = 3;
  std::int64_t channels = 8;

  int stages = 2;
  std::vector<std::int64_t> balance;  ///< layers per stage; empty: by measured time
  std::int64_t chunks = 2;
  Checkpoint checkpoint = Checkpoint::kExceptLast;
  std::vector<torch::Device> devices;
  std::filesystem::path trace;  ///< empty: none
};

/// Reads the command line. Returns nothing where the program should end at once with `exit_code`: after --help, or
/// after a message on standard error about what is wrong.
std::optional<Options> parse_options(int argc, char** argv, int& exit_code);

}  // namespace gpipe::unet
