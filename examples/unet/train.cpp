// Trains a U-Net on Carvana-format files, as a pipeline.

#include <c10/util/Exception.h>
#include <torch/utils.h>
#include <unistd.h>

#include <cstdio>
#include <exception>
#include <iostream>
#include <numeric>

#include "balance/by_time.h"
#include "examples/unet/files.h"
#include "examples/unet/options.h"
#include "examples/unet/synthetic.h"
#include "examples/unet/trainer.h"
#include "models/unet.h"

namespace gpipe::unet {
namespace {

constexpr Size kSyntheticSize{192, 128};

std::int64_t parameter_count(const torch::nn::Module& module) {
  std::int64_t count = 0;
  for (const auto& parameter : module.parameters()) count += parameter.numel();
  return count;
}

// The cut that the options ask for, or the one whose stages take equal time at the micro-batch size of the run.
std::vector<std::int64_t> choose_balance(const torch::nn::Sequential& model, const Options& options, Size size) {
  if (!options.balance.empty()) return options.balance;
  if (options.stages == 1) return {static_cast<std::int64_t>(model->size())};
  const auto samples = std::max<std::int64_t>(1, options.batch_size / options.chunks);
  return balance_by_time(options.stages, model, torch::rand({samples, 3, size.height, size.width}));
}

void print_plan(const GPipe& pipe, const Split& split, Size size, std::size_t layers) {
  std::cout << "data: " << split.training.size() << " images to train, " << split.validation.size()
            << " to validate, at " << size.width << "x" << size.height << "\n"
            << "model: U-Net, " << layers << " layers, " << parameter_count(*pipe) << " parameters\n"
            << "stages:";
  for (std::size_t s = 0; s < pipe->balance().size(); ++s) {
    std::cout << (s ? ", " : " ") << pipe->balance()[s] << " layers on " << pipe->devices()[s].str();
  }
  std::cout << std::endl;
}

int train(Options options) {
  check_writable_directory(options.output);
  if (!options.trace.empty()) {
    check_writable_directory(options.trace.has_parent_path() ? options.trace.parent_path() : ".");
  }
  std::filesystem::path data = options.data;
  if (options.data == "synthetic") {
    data = options.output / ("synthetic" + std::to_string(options.samples));
    write_synthetic(data, options.samples, kSyntheticSize, options.seed);
  }
  const auto split = unet::split(list_samples(data), options.validation, options.seed);
  const auto size = scaled(image_size(split.training.front().image), options.scale);

  torch::manual_seed(options.seed);
  auto model = models::unet(models::UNetOptions().depth(options.depth).base_channels(options.channels));
  const auto layers = model->size();
  GPipe pipe(model, choose_balance(model, options, size),
             GPipeOptions().devices(options.devices).chunks(options.chunks).checkpoint(options.checkpoint));
  print_plan(pipe, split, size, layers);

  Trainer trainer(pipe, split, size, options, std::cout, isatty(STDOUT_FILENO) != 0);
  trainer.run();
  std::cout << "wrote\n";
  if (options.data == "synthetic") std::cout << "  " << data.string() << "/\n";
  for (const auto& file : trainer.files()) std::cout << "  " << file.string() << "\n";
  return 0;
}

}  // namespace
}  // namespace gpipe::unet

int main(int argc, char** argv) {
  int exit_code = 0;
  const auto options = gpipe::unet::parse_options(argc, argv, exit_code);
  if (!options) return exit_code;
  try {
    return gpipe::unet::train(*options);
  } catch (const c10::Error& error) {
    std::cerr << "error: " << error.what_without_backtrace() << std::endl;
  } catch (const std::exception& error) {
    std::cerr << "error: " << error.what() << std::endl;
  }
  return 1;
}
