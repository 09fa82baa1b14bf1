// Trains a model that it has never seen, as a pipeline:
//
//   python -m gpipe export torchvision.models:resnet50 --input 4,3,64,64 -o resnet50.gpipe
//   build/dev/examples/finetune/finetune --model resnet50.gpipe --data images.safetensors --output trained.gpipe
//
// The data is a safetensors file with "target", and with "input", or "input.0", "input.1" and so on.

#include <torch/nn/functional/loss.h>
#include <torch/optim/sgd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <iomanip>
#include <iostream>
#include <stdexcept>

#include "absl/strings/str_cat.h"
#include "examples/common/plan.h"
#include "examples/common/step_record.h"
#include "gpipe/model.h"
#include "gpipe/snapshot.h"

namespace gpipe::examples {
namespace {

struct Options : PipelineOptions {
  std::filesystem::path model, data, output;
  double learning_rate = 0.01;
  int epochs = 1;
  bool watch = false;
};

void add_options(CLI::App& app, Options& options) {
  options.batch_size = 8;
  options.schedule = "1f1b";
  add_pipeline_options(app, options);
  app.add_option("--model", options.model, "file of python -m gpipe export")->required();
  app.add_option("--data", options.data, "safetensors file with inputs and targets")->required();
  app.add_option("--output", options.output, "file for the trained model");
  app.add_option("--learning-rate", options.learning_rate)->check(in_range(0));
  app.add_option("--epochs", options.epochs)->check(in_range(0));
  app.add_option("--schedule", options.schedule);
  app.add_flag("--watch", options.watch, "show what the workers do in each step");
}

struct Data {
  std::vector<torch::Tensor> inputs;
  torch::Tensor target;
};

Data read_data(const std::filesystem::path& path) {
  const auto tensors = read_weights(path);
  Data data;
  if (const auto* input = tensors.find("input")) data.inputs.push_back(*input);
  while (const auto* input = tensors.find(absl::StrCat("input.", data.inputs.size()))) data.inputs.push_back(*input);
  if (const auto* target = tensors.find("target")) data.target = *target;
  const auto fits = [&](const torch::Tensor& input) {
    return data.target.defined() && data.target.dim() > 0 && input.dim() > 0 && input.size(0) == data.target.size(0);
  };
  if (data.inputs.empty() || !std::all_of(data.inputs.begin(), data.inputs.end(), fits)) {
    throw std::invalid_argument(path.string() +
                                " must have 'input', or 'input.0' and so on, and 'target', of as many samples");
  }
  return data;
}

Value part_of(const std::vector<torch::Tensor>& tensors, std::int64_t begin, std::int64_t end) {
  std::vector<torch::Tensor> parts;
  for (const auto& tensor : tensors) parts.push_back(tensor.slice(0, begin, end));
  return parts.size() == 1 ? Value(parts.front()) : Value(std::move(parts));
}

int finetune(const Options& options) {
  const auto data = read_data(options.data);
  const auto model = load_model(options.model);
  const auto sample = std::max<std::int64_t>(2, options.batch_size / options.chunks);
  auto pipe = cut_by_time(model, options, part_of(data.inputs, 0, sample));
  std::cout << options.model.string() << ": " << model->size() << " layers in " << pipe->balance().size() << " stages\n"
            << std::setprecision(9);
  torch::optim::SGD optimizer(pipe->parameters(), options.learning_rate);
  const auto loss = tensor_loss(torch::nn::CrossEntropyLoss());
  torch::manual_seed(0);
  const auto samples = data.target.size(0);
  StepRecord record(options.watch);
  int step = 0;
  for (int epoch = 0; epoch < options.epochs; ++epoch) {
    for (std::int64_t begin = 0; begin + options.batch_size <= samples; begin += options.batch_size) {
      const auto end = begin + options.batch_size;  // leaves out a smaller last mini-batch
      optimizer.zero_grad();
      if (options.watch) record.begin(pipe);
      const auto result = pipe->step(part_of(data.inputs, begin, end), data.target.slice(0, begin, end), loss);
      if (options.watch) record.end(pipe, /*whole=*/false);
      optimizer.step();
      record.show(result.loss.item<double>(), options.batch_size);
      if (options.watch) continue;
      std::cout << absl::StrCat("step ", ++step) << " loss " << result.loss.item<float>() << std::endl;
    }
  }
  if (!options.output.empty()) save_model(options.output, *pipe);
  return 0;
}

}  // namespace
}  // namespace gpipe::examples

int main(int argc, char** argv) {
  CLI::App app("Trains a model of any PyTorch program, as a pipeline.");
  gpipe::examples::Options options;
  gpipe::examples::add_options(app, options);
  return gpipe::examples::run_program(app, argc, argv, [&] { return gpipe::examples::finetune(options); });
}
