#include "balance/by_time.h"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/csrc/api/include/torch/autograd.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "absl/cleanup/cleanup.h"
#include "balance/partition.h"
#include "gpipe/gpipe.h"

namespace gpipe {

// A pipeline with one layer a stage and one micro-batch never overlaps: its trace is a profile.
std::vector<double> time_layers(const torch::nn::Sequential& model, const Value& sample, int intraop_threads,
                                int repeats) {
  if (repeats < 1) {
    throw std::invalid_argument("[time_layers] repeats must be positive, but is " + std::to_string(repeats));
  }
  if (sample.tensors().empty()) throw std::invalid_argument("[time_layers] the sample holds no tensor");
  auto generator = at::detail::getDefaultCPUGenerator();
  const auto random_state = generator.get_state();
  SavedBuffers buffers(model->buffers());
  std::vector<bool> training;
  for (const auto& module : model->modules()) training.push_back(module->is_training());
  absl::Cleanup restore = [&] {
    buffers.restore();
    generator.set_state(random_state);
    auto was = training.begin();
    for (const auto& module : model->modules(/*include_self=*/true)) module->train(*was++);
  };

  const auto layers = model->size();
  GPipe pipe(model, std::vector<std::int64_t>(layers, 1),
             GPipeOptions()
                 .devices(std::vector<torch::Device>(layers, sample.tensors().front().device()))
                 .checkpoint(Checkpoint::kNever)
                 .intraop_threads(intraop_threads));
  pipe->train();
  std::vector<std::vector<double>> seconds(layers);
  for (int run = -1; run < repeats; ++run) {
    auto timeline = std::make_shared<Timeline>();
    pipe->trace(timeline);
    const auto output = pipe->forward(sample);
    std::vector<at::Tensor> roots;
    std::vector<at::Tensor> ones;
    for (const auto& tensor : output.tensors()) {
      if (!tensor.requires_grad()) continue;
      roots.push_back(tensor);
      ones.push_back(at::ones_like(tensor));
    }
    std::vector<at::Tensor> wanted;
    for (const auto& parameter : pipe->parameters()) {
      if (parameter.requires_grad()) wanted.push_back(parameter);
    }
    if (!roots.empty() && !wanted.empty()) {
      torch::autograd::grad(roots, wanted, ones, /*retain_graph=*/false, /*create_graph=*/false, /*allow_unused=*/true);
    }
    if (run < 0) continue;
    std::vector<double> of_run(layers, 0.0);
    for (const auto& span : timeline->spans) of_run[span.action.stage] += span.end - span.start;
    for (std::size_t layer = 0; layer < layers; ++layer) seconds[layer].push_back(of_run[layer]);
  }
  std::vector<double> medians;
  for (auto& times : seconds) {
    auto middle = times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2);
    std::nth_element(times.begin(), middle, times.end());
    medians.push_back(*middle);
  }
  return medians;
}

std::vector<std::int64_t> balance_by_time(int partitions, const torch::nn::Sequential& model, const Value& sample,
                                          int intraop_threads) {
  return partition(time_layers(model, sample, intraop_threads), partitions);
}

}  // namespace gpipe
