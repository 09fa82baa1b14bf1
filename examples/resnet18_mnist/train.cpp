// Trains a ResNet-18 on MNIST's files, as a pipeline.

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
#include "examples/resnet18_mnist/digits.h"
#include "examples/resnet18_mnist/task.h"
#include "models/resnet.h"

namespace gpipe::examples::mnist {
namespace {

constexpr std::int64_t kClasses = 10;

struct Options : TrainingOptions {
  std::string data = "synthetic";
  int samples = 6000;
  bool small_images = false;
};

void add_options(CLI::App& app, Options& options) {
  options.output = "out/resnet18_mnist";
  options.epochs = 5;
  options.batch_size = 64;
  options.chunks = 4;
  options.learning_rate = 2e-3;
  add_training_options(app, options);
  app.add_option("--data", options.data,
                 "folder with MNIST's four IDX files, uncompressed, or 'synthetic', which draws such files");
  app.add_option("--samples", options.samples,
                 "number of training images that 'synthetic' draws; it draws a sixth as many test images")
      ->transform(whole_number(60, 600000));
  app.add_flag("--small-images", options.small_images,
               "begin with a 3x3 convolution and without pooling: more accurate, 15 times the work");
}

int train(Options options) {
  options.ranks = join_processes(options.replicas);
  auto identity = make_identity({{"--small-images", absl::StrCat(options.small_images)}}, options);
  auto start = read_start(options, identity, history_columns(classification_scores()), std::cout);
  if (is_finished(options, start, std::cout)) return 0;
  torch::manual_seed(options.seed);
  auto model =
      models::resnet18(models::ResNetOptions().num_classes(kClasses).in_channels(1).small_images(options.small_images));
  check_pipeline(model, options);
  if (start) restore_start(options, *start, *model);
  if (options.resume.empty()) start.reset();

  const bool drawn = options.data == "synthetic";
  const auto data = drawn ? options.output / "digits" : std::filesystem::path(options.data);
  run_first(options.ranks, [&] {
    check_outputs(options);
    if (drawn) write_digits(data, options.samples, options.samples / 6, options.seed);
  });
  const auto training = read_idx(training_files(data));
  const auto test = read_idx(test_files(data));
  std::cout << "data: " << training.count() << " images to train, " << test.count() << " to test, "
            << to_string(training.size) << "\n";
  identity["images"] = absl::StrCat(training.count());
  if (start) check_identity(identity, *start, options.resume);
  check_last_mini_batch(options, static_cast<std::int64_t>(training.count()));

  const bool terminal = isatty(STDOUT_FILENO) != 0;
  const auto plan = make_plan(model, options, {1, training.size.height, training.size.width}, terminal, std::cout);
  auto pipe = make_pipe(model, plan, options);
  if (is_first(options.ranks)) print_plan(std::cout, "ResNet-18", model, pipe, plan, options.profile);
  model = nullptr;  // the pipeline has the layers of this process
  options.chunks = plan.chunks;
  options.checkpoint = plan.checkpoint;
  options.schedule = plan.schedule;

  ClassificationTask task(training, test, kClasses, options.batch_size, options.seed, options.ranks);
  Trainer trainer(pipe, task, options, identity, std::move(start), plan.prediction, std::cout, terminal);
  return run_and_report(trainer, drawn ? data : "", std::cout);
}

}  // namespace
}  // namespace gpipe::examples::mnist

int main(int argc, char** argv) {
  CLI::App app("Trains a ResNet-18 to read digits, as a pipeline over several devices.");
  gpipe::examples::mnist::Options options;
  gpipe::examples::mnist::add_options(app, options);
  return gpipe::examples::run_program(app, argc, argv, [&] { return gpipe::examples::mnist::train(options); });
}
