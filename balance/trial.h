#pragma once

#include "gpipe/gpipe.h"

namespace gpipe {

/// Returns a layer whose forward calls `forward` with `layer` and the input.
std::unique_ptr<Layer> decorate(std::unique_ptr<Layer> layer, std::function<Value(Layer& layer, Value input)> forward);

/// Runs a forward and a backward from gradients of ones. Leaves no gradients on parameters and runs no parameter hooks.
void trial_step(GPipe& pipe, const Value& batch);

/// The same in the order of the pipeline's schedule, with the sum of the outputs as the loss.
void trial_schedule(GPipe& pipe, const Value& batch);

/// Returns the first micro-batch of a mini-batch cut into `sizes`, whose tensors require grad as the mini-batch's do.
Value first_micro_batch(const Value& batch, const std::vector<std::int64_t>& sizes);

/// Returns a detached copy on the device, if one is given, whose tensors require grad where the value's do.
Value copy_of(const Value& value, std::optional<c10::Device> device = {});

/// Restores a module's state when destroyed: values, memory, version counters, gradients and requires_grad of the
/// parameters and buffers it had at first; training modes; the CPU's default generator. Leaves new tensors.
///
/// The constructor copies all buffers. A parameter is copied only during two forwards of its layer: the first that
/// builds an autograd graph and the first that does not. The copy is kept if that forward changed the parameter.
///
/// Thread safety: wrapped layers may run on several threads at once, but each layer and parameter on one at a time.
class RestoreModule {
 public:
  /// REQUIRES: a std::shared_ptr holds the module.
  explicit RestoreModule(const torch::nn::Module& module);
  /// Does not throw. Skips what cannot be restored, e.g. after a device failure.
  ~RestoreModule();
  RestoreModule(const RestoreModule&) = delete;
  RestoreModule& operator=(const RestoreModule&) = delete;

  /// Wraps the module's layers to note their first forwards. Each call must get the same layers in the same order.
  std::vector<std::unique_ptr<Layer>> wrap(std::vector<std::unique_ptr<Layer>> layers) const;

  /// Errors: std::runtime_error for a parameter that was changed, by its version, outside of those first forwards.
  void check() const;

 private:
  struct Saved;
  struct State;

  const std::shared_ptr<State> state_;
  const at::Tensor random_;
  std::vector<std::pair<std::shared_ptr<torch::nn::Module>, bool>> modes_;  // parents before children
};

}  // namespace gpipe
