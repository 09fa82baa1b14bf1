#include "examples/unet/options.h"

#include <CLI/CLI.hpp>
#include <map>
#include <thread>

namespace gpipe::unet {

std::optional<Options> parse_options(int argc, char** argv, int& exit_code) {
  Options options;
  std::vector<std::string> devices;
  CLI::App app("Trains a U-Net to segment images, as a pipeline over several devices.");
  app.get_formatter()->column_width(34);
  // A flag given twice: the last one counts, so that a script's own can be overridden.
  app.option_defaults()->always_capture_default()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);

  app.add_option(
      "--data", options.data,
      "directory with imgs/NAME.jpg|png and masks/NAME_mask.gif|png, or 'synthetic', which draws such files");
  app.add_option("-o,--output", options.output, "directory for what the run writes");
  app.add_option("--samples", options.samples, "images that 'synthetic' draws")->check(CLI::Range(2, 9999));
  app.add_option("-e,--epochs", options.epochs, "passes over the training images")->check(CLI::Range(1, 1000000));
  app.add_option("-b,--batch-size", options.batch_size, "images in a mini-batch")->check(CLI::PositiveNumber);
  app.add_option("-l,--learning-rate", options.learning_rate, "of Adam, at the start; falls to 0 along a cosine")
      ->check(CLI::PositiveNumber);
  app.add_option("-s,--scale", options.scale, "size of the images to train on, as a share of the files'")
      ->check(CLI::Range(0.001, 1.0));
  app.add_option("-v,--validation", options.validation, "percent of the images kept for validation")
      ->check(CLI::Range(0.01, 99.0));
  app.add_option("--seed", options.seed, "of weights, split, order and synthetic images");
  app.add_option("--workers", options.workers, "threads that decode ahead of training")->check(CLI::Range(1, 256));
  app.add_option("--depth", options.depth, "how often the U-Net halves the resolution")->check(CLI::Range(1, 16));
  app.add_option("--channels", options.channels, "of the U-Net at full resolution")->check(CLI::Range(1, 4096));

  const std::string pipeline = "Pipeline";
  auto* stages = app.add_option("--stages", options.stages, "parts that the model is cut into, one a device")
                     ->check(CLI::Range(1, 1024))
                     ->group(pipeline);
  app.add_option("--balance", options.balance, "layers in each stage, as 20,35; without it the cut is measured")
      ->delimiter(',')
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
      ->check(CLI::PositiveNumber)
      ->always_capture_default(false)
      ->group(pipeline);
  app.add_option("--chunks", options.chunks, "micro-batches in a mini-batch")
      ->check(CLI::PositiveNumber)
      ->group(pipeline);
  const std::map<std::string, Checkpoint> modes = {
      {"never", Checkpoint::kNever}, {"except_last", Checkpoint::kExceptLast}, {"always", Checkpoint::kAlways}};
  std::string mode = "except_last";
  app.add_option("--checkpoint", mode, "micro-batches that recompute instead of storing: never, except_last, always")
      ->check(CLI::IsMember({"never", "except_last", "always"}))
      ->group(pipeline);
  app.add_option("--devices", devices, "one a stage, as cuda:0,cuda:1; without it the GPUs, or the CPU")
      ->delimiter(',')
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
      ->always_capture_default(false)
      ->group(pipeline);
  app.add_option("--trace", options.trace, "write the timeline of one training step, for ui.perfetto.dev")
      ->always_capture_default(false)
      ->group(pipeline);

  try {
    app.parse(argc, argv);
    options.checkpoint = modes.at(mode);
    for (const auto& device : devices) {
      try {
        options.devices.emplace_back(device);
      } catch (const std::exception&) {
        throw CLI::ValidationError("--devices", "'" + device + "' is no device; give cpu, cuda or cuda:N");
      }
    }
    if (!options.balance.empty()) {
      const auto cuts = static_cast<int>(options.balance.size());
      if (stages->count() > 0 && options.stages != cuts) {
        throw CLI::ValidationError("--balance", "has " + std::to_string(cuts) + " stages, but --stages is " +
                                                    std::to_string(options.stages) + "; give one of them");
      }
      options.stages = cuts;
    }
  } catch (const CLI::ParseError& error) {
    exit_code = app.exit(error);
    return std::nullopt;
  }
  return options;
}

}  // namespace gpipe::unet
