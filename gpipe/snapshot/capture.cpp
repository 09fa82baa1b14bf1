#include <ATen/CPUGeneratorImpl.h>
#include <ATen/MemoryOverlap.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/QScheme.h>
#include <c10/util/Exception.h>
#include <torch/nn/module.h>

#include <mutex>
#include <sstream>
#include <stdexcept>

#include "gpipe/snapshot.h"
#include "gpipe/snapshot/tensor_kind.h"

namespace gpipe {
namespace {

/// The model's tensors, not copies.
NamedTensors tensors_of(const torch::nn::Module& model) {
  NamedTensors tensors;
  tensors.update(model.named_parameters());
  tensors.update(model.named_buffers());
  return tensors;
}

void check_writable(const std::string& name, const at::Tensor& tensor) {
  const char* reason = nullptr;
  if (at::has_internal_overlap(tensor) == at::MemOverlap::Yes) reason = "some of its elements share memory";
  if (tensor.is_inference() && !c10::InferenceMode::is_enabled()) reason = "it was made in inference mode";
  if (reason != nullptr) {
    throw std::invalid_argument("cannot restore '" + name + "' of this model: " + reason + "; clone it first");
  }
}

void check_same_kind(const std::string& name, const std::string& saved, const std::string& own) {
  if (saved != own) {
    throw std::invalid_argument("the snapshot is of another model: '" + name + "' is " + saved +
                                " in the snapshot and " + own + " in this model");
  }
}

}  // namespace

std::string kind_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return "undefined";
  std::ostringstream text;
  text << tensor.scalar_type() << tensor.sizes();
  if (tensor.layout() != at::kStrided) text << ' ' << tensor.layout();
  if (tensor.is_meta()) text << " without data";
  if (tensor.is_quantized()) text << ' ' << c10::toString(tensor.qscheme());
  return text.str();
}

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
    check_same_kind(item.key(), found == nullptr ? "missing" : kind_of(*found), kind_of(item.value()));
    check_writable(item.key(), item.value());
  }
  for (const auto& item : saved) {
    if (!tensors.contains(item.key())) check_same_kind(item.key(), kind_of(item.value()), "missing");
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
    throw std::invalid_argument("not a state of the CPU's random number generator: " +
                                std::string(error.what_without_backtrace()));
  }
}

}  // namespace gpipe
