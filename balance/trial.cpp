#include "balance/trial.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Functions.h>
#include <torch/csrc/api/include/torch/autograd.h>

#include <utility>

namespace gpipe {
namespace {

at::Generator generator() { return at::detail::getDefaultCPUGenerator(); }

}  // namespace

Untouched::Untouched(std::shared_ptr<torch::nn::Module> module)
    : module_(std::move(module)), buffers_(module_->buffers()), generator_state_(generator().get_state()) {
  for (const auto& each : module_->modules()) training_.push_back(each->is_training());
  for (const auto& tensor : tensors()) devices_.push_back(tensor.device());
}

Untouched::~Untouched() {
  auto device = devices_.begin();
  for (auto& tensor : tensors()) {
    if (tensor.device() != *device) tensor.set_data(tensor.to(*device));
    ++device;
  }
  buffers_.restore_after_error();
  generator().set_state(generator_state_);
  auto was = training_.begin();
  for (const auto& each : module_->modules()) each->train(*was++);
}

std::vector<at::Tensor> Untouched::tensors() const {
  auto all = module_->parameters();
  for (const auto& buffer : module_->buffers()) all.push_back(buffer);
  return all;
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
  std::vector<at::Tensor> wanted;
  for (const auto& parameter : pipe->parameters()) {
    if (parameter.requires_grad()) wanted.push_back(parameter);
  }
  if (roots.empty() || wanted.empty()) return;
  torch::autograd::grad(roots, wanted, ones, /*retain_graph=*/false, /*create_graph=*/false, /*allow_unused=*/true);
}

}  // namespace gpipe
