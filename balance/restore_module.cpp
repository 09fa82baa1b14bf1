#include "balance/restore_module.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include <array>
#include <mutex>
#include <stdexcept>
#include <string>

#include "absl/container/flat_hash_map.h"
#include "balance/layer_decorator.h"
#include "gpipe/tensors/parcel.h"
#include "gpipe/tensors/transfer.h"
#include "gpipe/tensors/version_watch.h"

namespace gpipe {
namespace {

bool same_memory(const at::Tensor& a, const at::Tensor& b) {
  return a.has_storage() && b.has_storage() && a.storage().is_alias_of(b.storage()) && a.dtype() == b.dtype() &&
         a.storage_offset() == b.storage_offset() && a.sizes() == b.sizes() && a.strides() == b.strides();
}

/// Ignores exceptions.
template <typename F>
void attempt(F f) noexcept {
  try {
    f();
  } catch (...) {
  }
}

}  // namespace

/// The state of a parameter or buffer.
struct RestoreModule::Saved {
  std::string name;
  at::Tensor tensor;
  at::Tensor memory;  ///< alias of the tensor's memory at that time
  at::Tensor copy;    ///< of the values in `memory`, if the module changes or may change them
  at::Tensor gradient;
  VersionWatch version;
  bool requires_grad = false;
  bool is_parameter = false;

  void restore() {
    if (copy.defined()) overwrite(memory, copy);
    // A lazy parameter that got its shape keeps it: its layer may depend on the shape.
    const bool was_lazy = is_parameter && memory.numel() == 0 && tensor.numel() > 0;
    if (!was_lazy && !same_memory(tensor, memory)) tensor.set_data(memory);
    version.put_back();
    if (tensor.is_leaf() && !tensor.grad().is_same(gradient)) tensor.mutable_grad() = gradient;
    if (tensor.requires_grad() != requires_grad) tensor.set_requires_grad(requires_grad);
  }
};

struct RestoreModule::State {
  void save(const std::string& name, const at::Tensor& tensor, bool is_parameter) {
    if (!tensor.defined() || !indices.try_emplace(tensor.unsafeGetTensorImpl(), saved.size()).second) return;
    const auto memory = tensor.variable_data();
    saved.push_back({.name = name,
                     .tensor = tensor,
                     .memory = memory,
                     .copy = is_parameter ? at::Tensor() : copy_of(memory),
                     .gradient = tensor.is_leaf() ? tensor.grad() : at::Tensor(),
                     .version = VersionWatch(tensor),
                     .requires_grad = tensor.requires_grad(),
                     .is_parameter = is_parameter});
  }

  std::vector<Saved> saved;
  absl::flat_hash_map<const void*, std::size_t> indices;  // by tensor
  std::vector<std::array<bool, 2>> watched;               // by layer: without and with autograd graph
};

/// Copies of a layer's parameters during one of its first forwards.
class RestoreModule::Copies {
 public:
  Copies(State& state, const torch::nn::Module& module) {
    const at::NoGradGuard no_grad;
    for (const auto& parameter : module.parameters()) {
      const auto found = state.indices.find(parameter.unsafeGetTensorImpl());
      if (found == state.indices.end()) continue;
      auto& saved = state.saved[found->second];
      if (saved.copy.defined() || !same_memory(saved.tensor, saved.memory)) continue;
      if (saved.version.changed()) continue;  // already changed
      copies_.push_back({&saved, copy_of(saved.memory)});
    }
  }

  /// Keeps the copies of changed parameters, also if the forward has thrown.
  ~Copies() {
    const at::NoGradGuard no_grad;
    for (auto& [saved, copy] : copies_) {
      bool same = false;
      // The version detects changes between equal values, e.g. from 0 to -0. The values detect writes that bypass the
      // version counter.
      attempt([&, saved = saved, copy = copy] { same = !saved->version.changed() && at::equal(saved->memory, copy); });
      if (!same) saved->copy = std::move(copy);
    }
  }

  Copies(const Copies&) = delete;
  Copies& operator=(const Copies&) = delete;

 private:
  std::vector<std::pair<Saved*, at::Tensor>> copies_;
};

class RestoreModule::WatchedLayer : public LayerDecorator {
 public:
  WatchedLayer(std::unique_ptr<Layer> layer, int index, std::shared_ptr<State> state)
      : LayerDecorator(std::move(layer)), index_(index), state_(std::move(state)) {}

  Value forward(Value input) override {
    bool& watched = state_->watched[index_][at::GradMode::is_enabled() ? 1 : 0];
    if (watched) return layer().forward(std::move(input));
    watched = true;
    const Copies copies(*state_, *module());
    return layer().forward(std::move(input));
  }

 private:
  const int index_;
  const std::shared_ptr<State> state_;
};

RestoreModule::RestoreModule(const torch::nn::Module& module) : state_(std::make_shared<State>()) {
  {
    auto source = at::detail::getDefaultCPUGenerator();
    const std::lock_guard<std::mutex> lock(source.mutex());
    generator_state_ = source.get_state();
  }
  for (const auto& each : module.modules()) modes_.emplace_back(each, each->is_training());
  const at::NoGradGuard no_grad;
  for (const auto& each : module.named_parameters()) state_->save(each.key(), each.value(), /*is_parameter=*/true);
  for (const auto& each : module.named_buffers()) state_->save(each.key(), each.value(), /*is_parameter=*/false);
}

RestoreModule::~RestoreModule() {
  const at::NoGradGuard no_grad;
  for (auto& saved : state_->saved) attempt([&] { saved.restore(); });
  for (const auto& [module, training] : modes_) {
    attempt([&, module = module.get(), training = training] { module->train(training); });
  }
  attempt([&] {
    auto target = at::detail::getDefaultCPUGenerator();
    const std::lock_guard<std::mutex> lock(target.mutex());
    target.set_state(generator_state_);
  });
}

std::vector<std::unique_ptr<Layer>> RestoreModule::watch(std::vector<std::unique_ptr<Layer>> layers) const {
  state_->watched.resize(layers.size());
  for (std::size_t i = 0; i < layers.size(); ++i) {
    layers[i] = std::make_unique<WatchedLayer>(std::move(layers[i]), static_cast<int>(i), state_);
  }
  return layers;
}

void RestoreModule::check() const {
  for (const auto& saved : state_->saved) {
    if (saved.copy.defined() || !same_memory(saved.tensor, saved.memory) || !saved.version.changed()) continue;
    throw std::runtime_error("[profile] parameter '" + saved.name +
                             "' was changed after its layer's first forwards, so it cannot be restored; profile a "
                             "copy of the model");
  }
}

}  // namespace gpipe
