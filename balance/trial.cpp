#include "balance/trial.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Functions.h>
#include <torch/csrc/api/include/torch/autograd.h>

#include <algorithm>
#include <cstddef>
#include <mutex>
#include <utility>

#include "gpipe/micro_batch.h"

namespace gpipe {
namespace {

at::Generator generator() { return at::detail::getDefaultCPUGenerator(); }

}  // namespace

Untouched::Untouched(const torch::nn::Module& module) : buffers_(module.buffers()) {
  {
    auto source = generator();
    const std::lock_guard<std::mutex> lock(source.mutex());
    generator_state_ = source.get_state();
  }
  for (const auto& each : module.modules()) modes_.emplace_back(each, each->is_training());
  for (const auto& tensors : {module.parameters(), module.buffers()}) {
    for (const auto& tensor : tensors) devices_.emplace_back(tensor, tensor.device());
  }
}

// An error here is one of a device that has failed for good.
Untouched::~Untouched() try {
  for (auto& [tensor, device] : devices_) {
    if (tensor.device() != device) tensor.set_data(tensor.to(device));
  }
  buffers_.restore_after_error();
  for (const auto& [module, training] : modes_) module->train(training);
  auto target = generator();
  const std::lock_guard<std::mutex> lock(target.mutex());
  target.set_state(generator_state_);
} catch (...) {
}

void trial_step(GPipe& pipe, const Value& batch) {
  const auto output = pipe->forward(batch);
  std::vector<at::Tensor> roots;
  std::vector<at::Tensor> ones;
  for (const auto& tensor : output.tensors()) {
    if (!tensor.requires_grad()) continue;
    roots.push_back(tensor);
    ones.push_back(at::ones_like(tensor));
  }
  if (roots.empty()) return;
  // The gradients go nowhere: no sum is accumulated, no hook is run.
  const auto node = roots.front().grad_fn();
  node->set_next_edges(torch::autograd::edge_list(node->num_outputs()));
  torch::autograd::backward(roots, ones);
}

Value first_micro_batch(const Value& batch, const std::vector<std::int64_t>& sizes) {
  auto first = scatter(batch, sizes).front();
  for (std::size_t i = 0; i < first.tensors.size(); ++i) first.tensors[i].set_requires_grad(first.wants_gradient[i]);
  return Value(first.form, std::move(first.tensors));
}

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

}  // namespace gpipe
