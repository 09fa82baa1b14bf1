// Times training of a ResNet-50 on one device, with model parallelism in two stages, with a pipeline at several
// micro-batch sizes, and with two data-parallel replicas. In four processes, which torchrun starts, also times replicas
// over two of them, and two replicas of two stages over all.

#include <torch/cuda.h>
#include <torch/utils.h>
#include <torch/version.h>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <CLI/CLI.hpp>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <memory>
#include <stdexcept>
#include <thread>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "bench/program.h"
#include "bench/resnet50_study/variants.h"
#include "gpipe/base/clock.h"

namespace gpipe::study {
namespace {

struct Options {
  Experiment experiment;
  std::filesystem::path output = "out/resnet50_study";
  std::vector<std::string> devices = {"cpu", "cpu"};
  bool overwrite = false;
  int batches = 3;
  int runs = 10;
};

/// Returns the first value of a key in a file in the format of /proc/cpuinfo.
std::string value_of(const std::filesystem::path& path, const std::string& key) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with(key)) return std::string(absl::StripAsciiWhitespace(line.substr(line.find(':') + 1)));
  }
  return "unknown";
}

std::string hardware(const Experiment& experiment) {
  auto text = absl::StrFormat("CPU: %s, %d cores, memory %s\n", value_of("/proc/cpuinfo", "model name"),
                              std::thread::hardware_concurrency(), value_of("/proc/meminfo", "MemTotal"));
  std::error_code none;
  for (const auto& gpu : std::filesystem::directory_iterator("/proc/driver/nvidia/gpus", none)) {
    absl::StrAppend(&text, "GPU: ", value_of(gpu.path() / "information", "Model"), "\n");
  }
  absl::StrAppend(&text, "torch: ", TORCH_VERSION, "; ", torch::get_num_threads(),
                  torch::get_num_threads() == 1 ? " thread" : " threads", " per device\ndevices:");
  for (const auto& device : experiment.devices) absl::StrAppend(&text, " ", device.str());
  const auto& processes = experiment.processes.all;
  if (processes) absl::StrAppend(&text, "\nprocesses: ", processes->size());
  return text + "\n";
}

void check(const Experiment& experiment) {
  if (experiment.batch_size % 2 != 0) {
    throw std::invalid_argument(absl::StrFormat(
        "--batch-size is %d, but two replicas split it equally; give an even number", experiment.batch_size));
  }
  for (const auto split : experiment.splits) {
    if (split <= experiment.batch_size) continue;
    throw std::invalid_argument(absl::StrFormat("--splits contains %d, which is more than the mini-batch's %d images",
                                                split, experiment.batch_size));
  }
  const auto& processes = experiment.processes.all;
  if (!processes || processes->size() == 4) return;
  throw std::invalid_argument(
      absl::StrFormat("there are %d processes; start one, or four: two replicas of two stages", processes->size()));
}

/// Makes the replicas of the processes, which meet in the file `store`.
void divide(Processes& processes, const std::filesystem::path& store) {
  const int all = processes.all->size();
  const int rank = processes.all->rank();
  const auto shared = c10::make_intrusive<c10d::FileStore>(store.string(), all);
  const auto replicas = [&](const char* name, int size) {
    return std::make_shared<Ranks>(c10::make_intrusive<c10d::PrefixStore>(name, shared), rank, size,
                                   RanksOptions().replicas(2));
  };
  if (rank < 2) processes.two = replicas("two", 2);
  processes.four = replicas("four", all);
}

double time_run(const Variant& variant, const std::vector<torch::Device>& devices, const torch::Tensor& input,
                const torch::Tensor& target, int batches) {
  const double start = now();
  for (int batch = 0; batch < batches; ++batch) variant.step(input, target);
  for (const auto& device : devices) {
    if (device.is_cuda()) torch::cuda::synchronize(device.index());
  }
  return now() - start;
}

void run(Options options) {
  auto& experiment = options.experiment;
  for (const auto& name : options.devices) experiment.devices.emplace_back(name);
  auto& processes = experiment.processes;
  if (std::getenv("TORCHELASTIC_RUN_ID") != nullptr) processes.all = Ranks::from_environment();
  const bool first = is_first(processes.all);
  check(experiment);
  const auto runs = options.output / "runs.csv";
  const auto store = options.output / "store";
  if (first) {
    if (std::filesystem::exists(runs) && !options.overwrite) {
      throw std::runtime_error(runs.string() +
                               " exists from an earlier study; give --overwrite to replace it, or another --output");
    }
    std::filesystem::create_directories(options.output);
    std::filesystem::remove(store);  // of a study that was killed
  }
  if (processes.all) processes.all->share("");  // the others wait
  if (processes.all) divide(processes, store);
  const auto about =
      hardware(experiment) +
      absl::StrFormat(
          "runs: %d per variant, in turn, after a warm-up mini-batch; %d mini-batches of %d images of %d x %d\n"
          "profiles per variant: %d; the median prediction is used\n",
          options.runs, options.batches, experiment.batch_size, experiment.image, experiment.image,
          experiment.predictions);
  std::ofstream csv;
  if (first) {
    std::cout << about << std::flush;
    std::ofstream(options.output / "hardware.txt") << about;
    csv.open(runs);
    csv << "variant,split_size,run,seconds,predicted_seconds\n";
  }
  torch::manual_seed(0);  // alike in all processes
  const auto device = experiment.devices.front();
  const auto input = torch::randn({experiment.batch_size, 3, experiment.image, experiment.image}, device);
  const auto classes = torch::randint(kClasses, {experiment.batch_size}, torch::kLong);
  const auto target = torch::one_hot(classes, kClasses).to(torch::kFloat).to(device);
  const auto tell = [&](const std::string& what) { std::cout << "profile: " << what << std::endl; };
  const auto variants = make_variants(experiment, tell);
  // The variants take turns, so that disturbances of the machine affect all of them. Run 0 is a warm-up. A process
  // that takes no part in a variant goes on to its next one, whose call waits for the others.
  for (int run = 0; run <= options.runs; ++run) {
    for (const auto& variant : variants) {
      const auto seconds = time_run(variant, experiment.devices, input, target, run == 0 ? 1 : options.batches);
      if (run == 0 || !first) continue;
      csv << absl::StrFormat("%s,%d,%d,%.6f,%.6f\n", variant.name, variant.split, run, seconds,
                             variant.predicted * options.batches)
          << std::flush;
    }
    if (first) std::cout << "run " << run << " of " << options.runs << std::endl;
  }
  if (!first) return;
  if (!csv) throw std::runtime_error("cannot write " + runs.string());
  std::cout << "wrote " << runs.string() << "\nwrote " << (options.output / "hardware.txt").string() << std::endl;
}

void make_quick(Options& options) {
  options.experiment.image = 40;
  options.experiment.predictions = 1;
  options.experiment.profile_seconds = 0;
  options.batches = 1;
  options.runs = 2;
}

}  // namespace
}  // namespace gpipe::study

int main(int argc, char** argv) {
  namespace study = gpipe::study;
  CLI::App app(
      "Times training of a ResNet-50 on one device, in two stages, as a pipeline and as two replicas. torchrun "
      "--nproc-per-node 4 also times replicas over processes.");
  study::Options options;
  auto& experiment = options.experiment;
  app.option_defaults()->always_capture_default();
  // Added first, so that other flags override its values.
  app.add_flag_callback(
      "--quick", [&] { study::make_quick(options); },
      "images of 40 pixels, 2 runs of 1 mini-batch; takes four minutes");
  app.add_option("-o,--output", options.output, "folder for runs.csv and hardware.txt");
  app.add_flag("--overwrite", options.overwrite,
               "replace the runs.csv of an earlier study; an error without this flag");
  app.add_option("--devices", options.devices, "two devices, e.g. cuda:0,cuda:1")->delimiter(',')->expected(2);
  app.add_option("-b,--batch-size", experiment.batch_size, "images per mini-batch")->check(CLI::Range(2, 100000));
  app.add_option("--image", experiment.image, "width and height of the images, in pixels")->check(CLI::Range(1, 10000));
  app.add_option("--splits", experiment.splits, "samples per micro-batch of pipelines")
      ->delimiter(',')
      ->check(CLI::PositiveNumber);
  app.add_option("--batches", options.batches, "mini-batches per run")->check(CLI::PositiveNumber);
  app.add_option("--runs", options.runs, "measured runs per variant")->check(CLI::PositiveNumber);
  app.add_option("--predictions", experiment.predictions, "profiles per variant; the median prediction is used")
      ->check(CLI::PositiveNumber);
  // One thread, so one core per CPU device.
  return gpipe::bench::run_program(app, argc, argv, [&] { study::run(options); });
}
