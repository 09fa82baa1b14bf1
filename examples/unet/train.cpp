// Trains a U-Net on files in the layout of the Carvana data set, as a pipeline.

#include <torch/utils.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <iostream>
#include <utility>

#include "absl/strings/str_cat.h"
#include "examples/common/flags.h"
#include "examples/common/outputs.h"
#include "examples/common/plan.h"
#include "examples/common/processes.h"
#include "examples/common/start.h"
#include "examples/common/trainer.h"
#include "examples/unet/model.h"
#include "examples/unet/scene.h"
#include "examples/unet/synthetic.h"
#include "examples/unet/task.h"

namespace gpipe::examples::unet {
namespace {

struct Options : TrainingOptions {
  std::string data = "synthetic";
  int samples = 400;
  std::string size = "192x128";
  double scale = 0.5;
  double validation = 10;  // percent
  bool augment = false;
  int workers = 2;
  ModelOptions model;
};

void add_options(CLI::App& app, Options& options) {
  options.output = "out/unet";
  options.epochs = 24;
  options.batch_size = 8;
  options.learning_rate = 5e-3;
  add_training_options(app, options);
  app.add_option("--data", options.data,
                 "folder with imgs/NAME.jpg|png and masks/NAME_mask.gif|png, or 'synthetic', which draws such files");
  app.add_option("--samples", options.samples, "number of images that 'synthetic' draws")
      ->transform(whole_number(2, 9999));
  app.add_option("--size", options.size, "size of the images that 'synthetic' draws, in pixels")
      ->transform(image_size_text());
  app.add_option("-s,--scale", options.scale, "size of the training images, relative to the files")
      ->transform(number_between(0.001, 1));
  app.add_option("-v,--validation", options.validation, "percentage of the images that is kept for validation")
      ->transform(number_between(0.01, 99));
  app.add_flag("--augment", options.augment, "mirror, shift and recolour the training images at random");
  app.add_option("--workers", options.workers,
                 "number of threads that decode images in advance; 0: decode between steps")
      ->transform(whole_number(0, 256));
  add_model_options(app, options.model);
}

std::filesystem::path drawn_data(const Options& options) {
  return options.output / absl::StrCat("synthetic_", options.samples, "_", options.size, "_", options.model.classes);
}

Identity own_identity(const Options& options) {
  auto identity = to_flags(options.model);
  identity["--validation"] = to_flag(options.validation);
  identity["--scale"] = to_flag(options.scale);
  identity["--augment"] = absl::StrCat(options.augment);
  return identity;
}

int train(Options options) {
  options.ranks = join_processes(options.replicas);
  const bool drawn = options.data == "synthetic";
  if (drawn) check_scene(to_size(options.size), options.model.classes);
  auto identity = make_identity(own_identity(options), options);
  auto start = read_start(options, identity, history_columns(segmentation_scores(options.model.classes)), std::cout);
  if (is_finished(options, start, std::cout)) return 0;
  torch::manual_seed(options.seed);
  auto model = make_model(options.model);
  check_pipeline(model, options);
  if (start) restore_start(options, *start, *model);
  if (options.resume.empty()) start.reset();

  const auto data = drawn ? drawn_data(options) : std::filesystem::path(options.data);
  run_first(options.ranks, [&] {
    check_outputs(options);
    if (drawn) write_synthetic(data, options.samples, to_size(options.size), options.seed, options.model.classes);
  });
  const auto split = unet::split(list_samples(data), options.validation, options.seed);
  const auto size = scaled(image_size(split.training.front().image), options.scale);
  identity["images"] = absl::StrCat(split.training.size());
  if (start) check_identity(identity, *start, options.resume);
  check_last_mini_batch(options, static_cast<std::int64_t>(split.training.size()));
  std::cout << "data: " << split.training.size() << " images to train, " << split.validation.size()
            << " to validate, at " << to_string(size) << ", " << options.model.classes << " classes\n";

  const bool terminal = isatty(STDOUT_FILENO) != 0;
  const auto plan = make_plan(model, options, {3, size.height, size.width}, terminal, std::cout);
  auto pipe = make_pipe(model, plan, options);
  if (is_first(options.ranks)) print_plan(std::cout, "U-Net", model, pipe, plan, options.profile);
  model = nullptr;  // the pipeline has the layers of this process
  options.chunks = plan.chunks;
  options.checkpoint = plan.checkpoint;
  options.schedule = plan.schedule;

  SegmentationTask task(split, size,
                        {.batch_size = options.batch_size,
                         .workers = options.workers,
                         .classes = options.model.classes,
                         .augment = options.augment,
                         .seed = options.seed,
                         .ranks = options.ranks});
  Trainer trainer(pipe, task, options, identity, std::move(start), plan.prediction, std::cout, terminal);
  return run_and_report(trainer, drawn ? data : "", std::cout);
}

}  // namespace
}  // namespace gpipe::examples::unet

int main(int argc, char** argv) {
  CLI::App app("Trains a U-Net to segment images, as a pipeline over several devices.");
  gpipe::examples::unet::Options options;
  gpipe::examples::unet::add_options(app, options);
  return gpipe::examples::run_program(app, argc, argv, [&] { return gpipe::examples::unet::train(options); });
}
