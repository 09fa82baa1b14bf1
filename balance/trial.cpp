#include "balance/trial.h"

#include <torch/csrc/api/include/torch/autograd.h>

#include <array>

#include "absl/cleanup/cleanup.h"
#include "gpipe/base/checks.h"
#include "gpipe/run/step_input.h"
#include "gpipe/snapshot/capture.h"
#include "gpipe/tensors/parcel.h"
#include "gpipe/tensors/transfer.h"

namespace gpipe {
namespace {

class DecoratedLayer : public Layer {
 public:
  using Forward = std::function<Value(Layer& layer, Value input)>;

  DecoratedLayer(std::unique_ptr<Layer> layer, Forward forward)
      : layer_(std::move(layer)), forward_(std::move(forward)) {}

  Value forward(Value input) override { return forward_(*layer_, std::move(input)); }
  const std::string& name() const override { return layer_->name(); }
  std::shared_ptr<torch::nn::Module> module() const override { return layer_->module(); }
  Buffers buffers() const override { return layer_->buffers(); }
  std::vector<at::Tensor> parameters() const override { return layer_->parameters(); }

 private:
  const std::unique_ptr<Layer> layer_;
  const Forward forward_;
};

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

std::unique_ptr<Layer> decorate(std::unique_ptr<Layer> layer, std::function<Value(Layer&, Value)> forward) {
  return std::make_unique<DecoratedLayer>(std::move(layer), std::move(forward));
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
  // Cut the edges behind the pipeline's node, so that nothing is accumulated and no hook runs.
  const auto node = roots.front().grad_fn();
  node->set_next_edges(torch::autograd::edge_list(node->num_outputs()));
  torch::autograd::backward(roots, ones);
}

void trial_schedule(GPipe& pipe, const Value& batch) {
  const auto sum = [](const Value& output, const Value&) {
    at::Tensor sum;
    for (const auto& tensor : output.tensors()) {
      if (!tensor.defined() || !(tensor.is_floating_point() || tensor.is_complex())) continue;
      const auto part = (tensor.is_complex() ? at::view_as_real(tensor) : tensor).sum();
      sum = sum.defined() ? sum + part : part;
    }
    return sum.defined() ? sum : at::zeros({});
  };
  pipe->compute_loss(batch, at::zeros({batch_size(batch)}), sum, StepOptions().reduction(Reduction::kSum));
}

Value first_micro_batch(const Value& batch, const std::vector<std::int64_t>& sizes) {
  auto first = scatter(batch, sizes).front();
  for (std::size_t i = 0; i < first.tensors.size(); ++i) first.tensors[i].set_requires_grad(first.wants_gradient[i]);
  return Value(first.form, std::move(first.tensors));
}

Value copy_of(const Value& value, std::optional<c10::Device> device) {
  auto tensors = value.tensors();
  for (auto& tensor : tensors) {
    tensor = copy_of(tensor, device.value_or(tensor.device())).set_requires_grad(tensor.requires_grad());
  }
  return Value(value.form(), std::move(tensors));
}

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

  /// Runs a layer's forward. In the first ones, copies its parameters, and keeps the copies of parameters that change.
  Value forward(int index, Layer& layer, Value input) {
    bool& has_run = runs[index][at::GradMode::is_enabled() ? 1 : 0];
    if (has_run) return layer.forward(std::move(input));
    has_run = true;
    const auto copies = copy_parameters(*layer.module());
    const absl::Cleanup keep = [&] { keep_changed(copies); };  // also if the forward throws
    return layer.forward(std::move(input));
  }

  using Copies = std::vector<std::pair<Saved*, at::Tensor>>;

  Copies copy_parameters(const torch::nn::Module& module) {
    const at::NoGradGuard no_grad;
    Copies copies;
    for (const auto& parameter : module.parameters()) {
      const auto found = indices.find(parameter.unsafeGetTensorImpl());
      if (found == indices.end()) continue;
      auto& of = saved[found->second];
      if (of.copy.defined() || !same_memory(of.tensor, of.memory) || of.version.changed()) continue;
      copies.emplace_back(&of, copy_of(of.memory));
    }
    return copies;
  }

  static void keep_changed(const Copies& copies) {
    const at::NoGradGuard no_grad;
    for (const auto& [saved, copy] : copies) {
      bool same = false;
      // The version detects changes between equal values, as 0 and -0; the values detect writes that bypass it.
      attempt([&, saved = saved, copy = copy] { same = !saved->version.changed() && at::equal(saved->memory, copy); });
      if (!same) saved->copy = copy;
    }
  }

  std::vector<Saved> saved;
  absl::flat_hash_map<const void*, std::size_t> indices;  // by tensor
  std::vector<std::array<bool, 2>> runs;                  // by layer: without and with autograd graph
};

RestoreModule::RestoreModule(const torch::nn::Module& module)
    : state_(std::make_shared<State>()), random_(capture_random()) {
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
  attempt([&] { restore_random(random_); });
}

std::vector<std::unique_ptr<Layer>> RestoreModule::wrap(std::vector<std::unique_ptr<Layer>> layers) const {
  state_->runs.resize(layers.size());
  for (int i = 0; i < std::ssize(layers); ++i) {
    layers[i] = decorate(std::move(layers[i]), [state = state_, i](Layer& layer, Value input) {
      return state->forward(i, layer, std::move(input));
    });
  }
  return layers;
}

void RestoreModule::check() const {
  for (const auto& saved : state_->saved) {
    if (saved.copy.defined() || !same_memory(saved.tensor, saved.memory) || !saved.version.changed()) continue;
    throw_error("parameter '", saved.name,
                "' was changed after its layer's first forwards, so it cannot be restored; "
                "profile a copy of the model");
  }
}

}  // namespace gpipe
