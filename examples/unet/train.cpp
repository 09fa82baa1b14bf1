// Trains a U-Net on Carvana-format files, as a pipeline.

#include <torch/utils.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <iostream>

#include "examples/common/trainer.h"
#include "examples/unet/synthetic.h"
#include "examples/unet/task.h"
#include "models/unet.h"

namespace gpipe::examples::unet {
namespace {

constexpr Size kSyntheticSize{192, 128};

struct Options : TrainingOptions {
  std::string data = "synthetic";
  int samples = 400;
  double scale = 0.5;
  double validation = 10;  // percent
  std::int64_t depth = 3;
  std::int64_t channels = 8;
  bool bilinear = false;
};

void add_options(CLI::App& app, Options& options) {
  options.output = "out/unet";
  options.epochs = 24;
  options.batch_size = 8;
  options.learning_rate = 5e-3;
  add_training_options(app, options);
  app.add_option(
      "--data", options.data,
      "directory with imgs/NAME.jpg|png and masks/NAME_mask.gif|png, or 'synthetic', which draws such files");
  app.add_option("--samples", options.samples, "images that 'synthetic' draws")->check(CLI::Range(2, 9999));
  app.add_option("-s,--scale", options.scale, "size of the images to train on, as a share of the files'")
      ->check(CLI::Range(0.001, 1.0));
  app.add_option("-v,--validation", options.validation, "percent of the images kept for validation")
      ->check(CLI::Range(0.01, 99.0));
  app.add_option("--depth", options.depth, "how often the U-Net halves the resolution")->check(CLI::Range(1, 16));
  app.add_option("--channels", options.channels, "of the U-Net at full resolution")->check(CLI::Range(1, 4096));
  app.add_flag("--bilinear", options.bilinear, "up-sample by interpolation instead of transposed convolutions");
}

int train(const Options& options) {
  check_outputs(options);
  std::filesystem::path data = options.data;
  if (options.data == "synthetic") {
    data = options.output / ("synthetic" + std::to_string(options.samples));
    write_synthetic(data, options.samples, kSyntheticSize, options.seed);
  }
  const auto split = unet::split(list_samples(data), options.validation, options.seed);
  const auto size = scaled(image_size(split.training.front().image), options.scale);
  std::cout << "data: " << split.training.size() << " images to train, " << split.validation.size()
            << " to validate, at " << to_string(size) << "\n";

  torch::manual_seed(options.seed);
  const auto upsampling = options.bilinear ? models::Upsampling::kLinear : models::Upsampling::kTransposed;
  auto model =
      models::unet(models::UNetOptions().depth(options.depth).base_channels(options.channels).upsampling(upsampling));
  GPipe pipe(model, choose_balance(model, options, {3, size.height, size.width}),
             GPipeOptions().devices(options.devices).chunks(options.chunks).checkpoint(options.checkpoint));
  print_plan(std::cout, "U-Net", pipe);

  SegmentationTask task(split, size,
                        {.batch_size = options.batch_size, .workers = options.workers, .seed = options.seed},
                        options.output);
  const std::map<std::string, std::string> identity = {{"--batch-size", std::to_string(options.batch_size)},
                                                       {"--seed", std::to_string(options.seed)},
                                                       {"--validation", std::to_string(options.validation)},
                                                       {"--scale", std::to_string(options.scale)},
                                                       {"--schedule", options.schedule},
                                                       {"images", std::to_string(split.training.size())}};
  Trainer trainer(pipe, task, options, identity, std::cout, isatty(STDOUT_FILENO) != 0);
  return run_and_report(trainer, options.data == "synthetic" ? data : "", std::cout);
}

}  // namespace
}  // namespace gpipe::examples::unet

int main(int argc, char** argv) {
  CLI::App app("Trains a U-Net to segment images, as a pipeline over several devices.");
  gpipe::examples::unet::Options options;
  gpipe::examples::unet::add_options(app, options);
  return gpipe::examples::run_program(app, argc, argv, [&] { return gpipe::examples::unet::train(options); });
}
