#pragma once

#include <torch/arg.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/pimpl.h>
#include <torch/types.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "gpipe/autograd/checkpointing.h"
#include "gpipe/autograd/random_scope.h"
#include "gpipe/autograd/value.h"
#include "gpipe/nested.h"
#include "gpipe/pipeline.h"
#include "gpipe/schedule/generators.h"
#include "gpipe/schedule/simulator.h"
#include "skip/layout.h"
#include "skip/skippable.h"

namespace gpipe {

/// Options of a GPipe, in LibTorch's style: GPipeOptions().chunks(8).checkpoint(gpipe::Checkpoint::kAlways).
struct GPipeOptions {
  /// One device per stage; surplus ones are ignored. Empty: the GPUs, or the CPU for all stages where there are none. A
  /// device may appear more than once.
  TORCH_ARG(std::vector<torch::Device>, devices);
  /// The most micro-batches that a mini-batch is cut into. Each but the last has ceil(samples / chunks) samples, so
  /// there may be fewer of them. 1 is plain model parallelism.
  TORCH_ARG(std::int64_t, chunks) = 1;
  /// Samples per micro-batch, instead of chunks, which must then be 1; 0: chunks counts.
  TORCH_ARG(std::int64_t, split_size) = 0;
  /// Which cells recompute their forward in training mode instead of storing its graph. A recompute gets the same
  /// inputs, buffers and random numbers. A layer whose output depends on other state that each forward changes needs
  /// kNever. The first recomputed cell of a stage builds its graph in its forward too, to learn which outputs need
  /// gradients, and drops it.
  TORCH_ARG(Checkpoint, checkpoint) = Checkpoint::kExceptLast;
  /// Batch norm in training mode updates its running statistics once a mini-batch, with the mean and variance of all of
  /// it, instead of once a micro-batch. (Each micro-batch is normalised by its own in both cases.)
  TORCH_ARG(bool, deferred_batch_norm) = false;
  /// Threads that one operator of a CPU stage may use; 0: torch::get_num_threads() shared equally among the CPU stages,
  /// at least one each.
  TORCH_ARG(int, intraop_threads) = 0;
};

/// Trains a sequential model over several devices: cuts it into stages by a balance, each with a worker thread and a
/// device, and runs each mini-batch as micro-batches through them (GPipe, Huang et al., arXiv:1811.06965).
///
///   auto pipe = gpipe::GPipe(model, {4, 3}, gpipe::GPipeOptions().chunks(8));
///   auto loss = criterion(pipe->forward(x), y);
///   loss.backward();
///   optimizer.step();
///
/// It computes the function of the unpartitioned model run micro-batch by micro-batch. Its result has one autograd
/// node, whose inputs are the inputs and all parameters that require grad: losses, optimizers, hooks and autograd::grad
/// work as without a pipeline, but for create_graph, which is refused. Its state has the unpartitioned model's keys.
///
/// The layers are the caller's own modules, moved to their devices. A mini-batch's random draws derive from one draw of
/// the default generator (see RandomScope). In training mode with gradients enabled, cells are recomputed as the
/// options say. In eval mode with gradients enabled, each cell's graph is stored and nothing is recomputed. Without
/// gradients nothing is stored.
///
/// Threads: forward and backward may be called from any threads but the pipeline's own; calls take turns. The module's
/// parameters and mode must not change while one runs, nor between a forward and its backward where cells are
/// recomputed.
///
/// Errors: a forward or backward throws the object that a layer threw; see last_error(). Afterwards gradients, buffers
/// and the default generator are as before the call, and the next call works. A parameter that a layer changes in its
/// forward stays changed. What a backward throws should be a std::exception: PyTorch's engine handles nothing else
/// well, so anything else that a recompute throws becomes a std::runtime_error.
class GPipeImpl : public torch::nn::Module {
 public:
  /// Errors: std::invalid_argument for a model without layers, or with parameters or buffers of its own, a balance
  /// that is not positive or does not sum to the number of layers, duplicate layers, a parameter in two stages, a buffer
  /// in two stages that they cannot share, skips that do not match (see verify_skippables) or options that make no
  /// sense; std::out_of_range for fewer devices than stages, or a device that is not there.
  GPipeImpl(const torch::nn::Sequential& model, std::vector<std::int64_t> balance, GPipeOptions options = {});
  /// A model that the library's own nestable Sequential holds.
  GPipeImpl(const NestedSequential& model, std::vector<std::int64_t> balance, GPipeOptions options = {});
  /// A model of layers of any kind, run from a program in any language.
  GPipeImpl(std::vector<std::unique_ptr<Layer>> layers, std::vector<std::int64_t> balance, GPipeOptions options = {},
            LanguageBinding binding = {});

  /// The whole model on one mini-batch: dimension 0 is the batch. The result is on the last stage's device.
  /// Errors: std::invalid_argument for inputs that cannot be cut; c10::NotImplementedError under torch.jit.trace, a
  /// functorch transform or forward-mode differentiation; what layers throw.
  torch::Tensor forward(torch::Tensor input);
  /// For models that take or return several tensors. The first layer gets a vector; any form of result is returned as
  /// one.
  std::vector<torch::Tensor> forward(std::vector<torch::Tensor> input);
  /// The same, keeping the C++ types: Value(std::make_tuple(a, b)) gives the first layer a tuple.
  Value forward(Value input);
  /// The same, with these chunks instead of the options' chunks and split_size, and with this checkpoint mode, also in
  /// eval mode.
  Value forward(Value input, std::int64_t chunks, Checkpoint checkpoint);

  const std::vector<std::int64_t>& balance() const { return balance_; }
  /// One per stage.
  const std::vector<torch::Device>& devices() const { return devices_; }
  const GPipeOptions& options() const { return options_; }

  /// Where the last forward or backward failed; none when it succeeded, or failed outside of its actions.
  std::optional<ErrorInfo> last_error() const;

  /// From now on each forward and its backward append what ran to the timeline. nullptr ends it for later forwards, of
  /// which nothing is measured.
  ///
  ///   auto timeline = std::make_shared<gpipe::Timeline>();
  ///   pipe->trace(timeline);
  ///   pipe->forward(x).sum().backward();
  ///   file << gpipe::to_chrome_json(*timeline);
  ///
  /// On an accelerator the worker then waits for each action, so that the times are those of the work. Each span also
  /// says what memory its worker had in use. Counting takes the place of PyTorch's own profiler: where one is at work
  /// already, no bytes are counted. Read the timeline while no call runs.
  void trace(std::shared_ptr<Timeline> timeline);

  /// Whether no mini-batch, and no graph of one, needs the pipeline.
  bool idle() const { return pipeline_.use_count() == 1; }

  /// What a training step of so many micro-batches runs, to verify, simulate or draw. Errors: std::invalid_argument for
  /// a number that is not positive, or for more than kMostCells cells.
  std::shared_ptr<const Program> program(int micro_batches) const;

  /// Loads the state of the unpartitioned model, wherever it was saved. Parameters and buffers stay on their devices.
  void load(torch::serialize::InputArchive& archive) override;

  /// Errors: c10::TypeError: parameters stay on the stages' devices. to(dtype) is allowed.
  void to(torch::Device device, torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Device device, bool non_blocking = false) override;
  using torch::nn::Module::to;

 private:
  Value run(Value input, const std::vector<std::int64_t>& sizes, Checkpoint checkpoint);

  std::vector<std::int64_t> balance_;
  GPipeOptions options_;
  std::vector<torch::Device> devices_;
  std::shared_ptr<Pipeline> pipeline_;
};

/// Holds a GPipeImpl, as LibTorch's module holders do.
class GPipe : public torch::nn::ModuleHolder<GPipeImpl> {
 public:
  using torch::nn::ModuleHolder<GPipeImpl>::ModuleHolder;
  using Impl = GPipeImpl;

  GPipe(const torch::nn::Sequential& model, std::vector<std::int64_t> balance, GPipeOptions options = {})
      : ModuleHolder(std::make_shared<GPipeImpl>(model, std::move(balance), std::move(options))) {}
  GPipe(const NestedSequential& model, std::vector<std::int64_t> balance, GPipeOptions options = {})
      : ModuleHolder(std::make_shared<GPipeImpl>(model, std::move(balance), std::move(options))) {}
  GPipe(std::vector<std::unique_ptr<Layer>> layers, std::vector<std::int64_t> balance, GPipeOptions options = {},
        LanguageBinding binding = {})
      : ModuleHolder(std::make_shared<GPipeImpl>(std::move(layers), std::move(balance), std::move(options),
                                                 std::move(binding))) {}
};

}  // namespace gpipe
