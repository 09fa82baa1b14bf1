#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <torch/nn/module.h>

#include <mutex>
#include <sstream>
#include <stdexcept>

#include "gpipe/snapshot/snapshot.h"

namespace gpipe {
namespace {

/// The tensors themselves, not copies.
NamedTensors tensors_of(const torch::nn::Module& model) {
  NamedTensors tensors;
  tensors.update(model.named_parameters());
  tensors.update(model.named_buffers());
  return tensors;
}

std::string kind_of(const at::Tensor& tensor) {
  std::ostringstream text;
  text << tensor.scalar_type() << tensor.sizes();
  return text.str();
}

}  // namespace

NamedTensors capture_model(const torch::nn::Module& model) {
  NamedTensors copies;
  for (const auto& item : tensors_of(model)) {
    copies.insert(item.key(), item.value().detach().to(at::kCPU, /*non_blocking=*/false, /*copy=*/true));
  }
  return copies;
}

void restore_model(torch::nn::Module& model, const NamedTensors& saved) {
  auto tensors = tensors_of(model);
  for (const auto& item : tensors) {
    const auto* found = saved.find(item.key());
    if (found == nullptr) {
      throw std::invalid_argument("the snapshot is of another model: it has no '" + item.key() + "', in this model " +
                                  kind_of(item.value()));
    }
    if (found->sizes() != item.value().sizes() || found->scalar_type() != item.value().scalar_type()) {
      throw std::invalid_argument("the snapshot is of another model: '" + item.key() + "' is " + kind_of(*found) +
                                  " in the snapshot and " + kind_of(item.value()) + " in this model");
    }
  }
  for (const auto& item : saved) {
    if (!tensors.contains(item.key())) {
      throw std::invalid_argument("the snapshot is of another model: this model has no '" + item.key() +
                                  "', in the snapshot " + kind_of(item.value()));
    }
  }
  const c10::AutoGradMode no_gradients(false);
  for (auto& item : tensors) item.value().copy_(saved[item.key()]);
}

at::Tensor capture_random() {
  auto generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard lock(generator.mutex());
  return generator.get_state();
}

void restore_random(const at::Tensor& saved) {
  auto generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard lock(generator.mutex());
  try {
    generator.set_state(saved);
  } catch (const c10::Error& error) {
    throw std::invalid_argument("this is no state of the CPU's generator: " +
                                std::string(error.what_without_backtrace()));
  }
}

}  // namespace gpipe
