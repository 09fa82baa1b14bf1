#include "bench/measure.h"

#include <c10/util/Exception.h>
#include <torch/cuda.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/linear.h>
#include <torch/utils.h>

#include <CLI/CLI.hpp>
#include <iostream>
#include <nlohmann/json.hpp>

#include "gpipe/base/checks.h"
#include "gpipe/base/clock.h"
#include "gpipe/nested.h"
#include "gpipe/schedules.h"
#include "models/resnet.h"
#include "models/unet.h"

namespace gpipe::bench {

namespace nn = torch::nn;

namespace {

// Waits for the GPU, if there is one.
void synchronize() {
  static const bool has_gpu = torch::cuda::is_available();
  if (has_gpu) torch::cuda::synchronize();
}

// `large`: of a size for GPUs.
Subject subject_on_cpu(const std::string& name, int chunks, bool large) {
  torch::manual_seed(0);
  // The mini-batch is the same for every number of chunks.
  const auto split = [&](std::int64_t samples) {
    if (samples % chunks == 0) return samples / chunks;
    refuse_argument("the mini-batch of ", name, " has ", samples, " samples, which cannot be split into ", chunks,
                    " equal micro-batches");
  };
  nn::Sequential model;
  if (name == "tiny") {
    for (int i = 0; i < 16; ++i) model->push_back(nn::Linear(8, 8));
    return {model, torch::randn({8 * chunks, 8}), 8};
  }
  if (name == "mlp") {
    const std::int64_t width = large ? 4096 : 1024;
    const std::int64_t rows = large ? 8192 : 1024;
    for (int i = 0; i < 16; ++i) {
      model->push_back(NestedSequential({{"linear", nn::Linear(width, width)}, {"relu", nn::ReLU()}}));
    }
    return {model, torch::randn({rows, width}), split(rows)};
  }
  if (name == "unet") {
    const std::int64_t side = large ? 192 : 96;
    model = models::unet(models::UNetOptions().base_channels(large ? 64 : 16));
    return {model, torch::randn({16, 3, side, side}), split(16)};
  }
  const std::int64_t side = large ? 224 : 64;
  model = name == "resnet18" ? models::resnet18() : models::resnet50();
  return {model, torch::randn({16 * chunks, 3, side, side}), 16};
}

// Prints in one write, because ranks may share a terminal.
void print_error(const std::string& text) { std::cerr << "error: " + text + "\n"; }

}  // namespace

void add_flags(CLI::App& app, Options& options) {
  app.option_defaults()->always_capture_default()->delimiter(',');
  app.add_option("--model", options.models, "models to run")->check(CLI::IsMember(options.models));
  auto* stages = app.add_option("--stages", options.stages, "numbers of stages");
  stages->check(CLI::PositiveNumber);
  const auto set_balance = [&](const std::vector<std::int64_t>& balance) {
    options.balance = balance;
    options.stages = {static_cast<int>(balance.size())};
  };
  app.add_option_function<std::vector<std::int64_t>>("--balance", set_balance, "layers per stage")
      ->always_capture_default(false)
      ->excludes(stages);
  app.add_option("--chunks", options.chunks, "numbers of micro-batches per mini-batch")->check(CLI::PositiveNumber);
  app.add_option("--checkpoint", options.checkpoints, "checkpoint modes")
      ->check(CLI::IsMember({"never", "except_last", "always"}));
  std::vector<std::string> names;
  for (const auto& rule : schedule_rules()) names.emplace_back(rule.name);
  names.emplace_back(kAnySchedule);
  app.add_option("--schedule", options.schedules, "schedules")->check(CLI::IsMember(names));
  app.add_option("--device", options.device, "device of all stages, such as cuda:0");
  app.add_option("--repeats", options.repeats, "measured repeats per row")->check(CLI::PositiveNumber);
}

void for_each_row(const Options& options, const std::function<void(const Row&)>& measure) {
  for (const auto& model : options.models) {
    for (const int stages : options.stages) {
      for (const int chunks : options.chunks) {
        for (const auto& checkpoint : options.checkpoints) {
          measure({model, stages, chunks, checkpoints().at(checkpoint)});
        }
      }
    }
  }
}

void print(const char* bench, const Row& row, const std::map<std::string, std::vector<double>>& values) {
  nlohmann::ordered_json line = {{"bench", bench},
                                 {"model", row.model},
                                 {"stages", row.stages},
                                 {"chunks", row.chunks},
                                 {"checkpoint", to_string(row.checkpoint)},
                                 {"schedule", row.schedule}};
  for (const auto& [name, of_name] : values) line[name] = of_name;
  std::cout << line << std::endl;
}

std::vector<std::vector<double>> interleave(const std::vector<std::function<void()>>& functions, int repeats) {
  std::vector<std::vector<double>> seconds(functions.size());
  for (const auto& function : functions) function();
  for (int repeat = 0; repeat < repeats; ++repeat) {
    for (std::size_t i = 0; i < functions.size(); ++i) {
      synchronize();
      const double start = now();
      functions[i]();
      synchronize();
      seconds[i].push_back(now() - start);
    }
  }
  return seconds;
}

Subject subject(const std::string& name, int chunks, torch::Device device) {
  auto made = subject_on_cpu(name, chunks, /*large=*/!device.is_cpu());
  made.model->to(device);
  made.input = made.input.to(device);
  return made;
}

void step(GPipe& pipe, const torch::Tensor& input) {
  pipe->zero_grad();
  const auto sum = tensor_loss([](const torch::Tensor& output, const torch::Tensor&) { return output.sum(); });
  const auto target = input.detach();  // step() needs one
  pipe->step(input, target, sum, StepOptions().reduction(Reduction::kSum));
}

int run_program(CLI::App& app, int argc, char** argv, const std::function<void()>& run) {
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
