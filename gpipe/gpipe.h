#pragma once

#include <torch/nn/module.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/pimpl.h>
#include <torch/types.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "gpipe/api.h"
#include "gpipe/error_info.h"
#include "gpipe/layer.h"
#include "gpipe/layer_factory.h"
#include "gpipe/loss.h"
#include "gpipe/nested.h"
#include "gpipe/options.h"
#include "gpipe/program.h"
#include "gpipe/random_scope.h"
#include "gpipe/team.h"
#include "gpipe/value.h"
#include "skip/skippable.h"

namespace gpipe {

struct LanguageBinding;
class Pipeline;

/// Trains a sequential model on several devices (GPipe, Huang et al., arXiv:1811.06965). Cuts the model into stages by
/// a balance, each with a device and a worker thread, and sends each mini-batch through them as micro-batches.
///
///   auto pipe = gpipe::GPipe(model, {4, 3}, gpipe::GPipeOptions().chunks(8));
///   auto loss = criterion(pipe->forward(x), y);
///   loss.backward();
///   optimizer.step();
///
/// Computes what the unpartitioned model computes micro-batch by micro-batch. The result has one autograd node, whose
/// inputs are the mini-batch and all parameters that require grad. So losses, optimizers, hooks and autograd::grad work
/// as without a pipeline; create_graph is refused. The module's state has the unpartitioned model's keys.
///
/// The layers are the caller's own modules, moved to their devices. Layers of stages on one device, or on several
/// ranks, can share a parameter; none may write to it. A mini-batch's random numbers derive from one draw from the
/// default generator (see RandomScope). In training mode, the checkpoint option decides which cells are recomputed;
/// eval mode stores every graph. Without gradients nothing is stored.
///
/// Thread safety: call forward, backward and step on any thread but the pipeline's workers; concurrent calls take
/// turns. Change no parameter or mode during a call, nor, if cells are recomputed, from a forward to its backward.
///
/// Errors: a call throws what a layer threw; see last_error(). what() of a class of LibTorch or the standard library
/// tells the place too. Parameters, buffers and the default generator are then as before the call, gradients too, except
/// as step() says, and the next call works. A backward throws std::runtime_error in the place of an object that is not a
/// std::exception.
class GPIPE_API GPipeImpl : public torch::nn::Module {
 public:
  /// Errors: std::invalid_argument for a model without layers, a Sequential with parameters or buffers of its own, a
  /// balance that is not positive or does not sum to the number of layers, duplicate layers, a parameter in stages on
  /// two devices, a buffer in two stages that they cannot share, skips that do not match (see verify_skippables), or
  /// invalid options; std::out_of_range for fewer devices than stages, or a device that does not exist.
  GPipeImpl(const torch::nn::Sequential& model, std::vector<std::int64_t> balance, GPipeOptions options = {});
  /// The same for a NestedSequential.
  GPipeImpl(const NestedSequential& model, std::vector<std::int64_t> balance, GPipeOptions options = {});
  /// The same for factories of layers. Calls them in order, each in a RandomScope of its own, and keeps this rank's
  /// layers. So the initial values do not depend on the balance or the ranks, but a Sequential's values differ.
  /// Errors: also what a factory throws, which ends the job on all ranks; std::invalid_argument for a factory that
  /// returns no module, or two layers of one name.
  GPipeImpl(LayerFactories model, std::vector<std::int64_t> balance, GPipeOptions options = {});
  /// The same for layers of any kind; `binding` (gpipe/binding.h) serves programs in other languages.
  GPipeImpl(std::vector<std::unique_ptr<Layer>> layers, std::vector<std::int64_t> balance, GPipeOptions options,
            const LanguageBinding& binding);

  /// Runs the model on one mini-batch, whose dimension 0 is the batch. The result is on the last stage's device; over
  /// ranks, see RanksOptions::share_outputs. Warns once, in training, if the schedule is not fill and drain, because only
  /// step() runs it.
  /// Errors: std::invalid_argument for inputs that cannot be cut; c10::NotImplementedError under torch.jit.trace, a
  /// functorch transform or forward-mode differentiation; what layers throw.
  torch::Tensor forward(torch::Tensor input);
  // With `&`, AnyModule and Sequential see only the forward() above, so they can hold a pipeline.
  /// The same for several tensors: the first layer gets a vector. The result is a vector in any case.
  std::vector<torch::Tensor> forward(std::vector<torch::Tensor> input) &;
  /// For any form of input and result: Value(std::make_tuple(a, b)) gives the first layer a tuple.
  Value forward(Value input) &;
  /// The same, with these chunks and this checkpoint mode instead of the options', also in eval mode.
  Value forward(Value input, std::int64_t chunks, const Checkpoints& checkpoints) &;

  /// Trains on one mini-batch: runs forwards, losses and backwards in the order of the schedule. Adds to `.grad` of the
  /// parameters and of inputs that require grad, as a backward does; zero it first.
  ///
  ///   auto result = pipe->step(x, y, gpipe::tensor_loss([](auto out, auto y) { return torch::mse_loss(out, y); }));
  ///
  /// `target` is cut as the input is, and may be on any device. The last stage computes the loss of each micro-batch.
  /// Under autocast, forwards and recomputes use autocast; backwards do not. REQUIRES: the loss decomposes over
  /// samples; see check_loss() and StepOptions::check.
  ///
  /// Errors: as forward() and backward(), with the layer "loss" for the loss function; std::invalid_argument for a
  /// target that cannot be cut as the input or requires grad, invalid options, or a loss that is not a scalar;
  /// std::runtime_error in eval mode, without grad mode or inside DistributedDataParallel. After an error no gradient
  /// has been added, unless a hook threw it; except to a `.grad` of earlier steps, which then may hold a part.
  StepResult step(Value input, Value target, const LossFunction& loss, const StepOptions& options = {});

  /// As step(), but adds nothing to `.grad`. Returns the loss with a node that holds the gradients. Serves
  /// autograd::grad, and modules in DistributedDataParallel.
  torch::Tensor compute_loss(Value input, Value target, const LossFunction& loss, const StepOptions& options = {});

  const std::vector<std::int64_t>& balance() const { return balance_; }
  /// The device of each worker.
  const std::vector<torch::Device>& devices() const { return devices_; }
  /// The worker of each stage.
  const std::vector<int>& placement() const;
  /// The schedule of step(), as in GPipeOptions; "auto" until the first step() has chosen one: a name, or the text form.
  std::string schedule() const;
  const GPipeOptions& options() const { return options_; }
  /// Whether a stage is on this rank. Stages of other ranks have no layers here.
  bool is_here(int stage) const;

  /// The parameters that this rank trains, each once. One that several ranks share belongs to the rank of its first
  /// stage; the other ranks have copies, which get its value in each call.
  std::vector<torch::Tensor> parameters() const;

  /// Where the last forward, backward or step failed; std::nullopt if it succeeded or failed outside of an action.
  std::optional<ErrorInfo> last_error() const;

  /// Makes later calls append their actions to the timeline. nullptr ends this.
  ///
  ///   auto timeline = std::make_shared<gpipe::Timeline>();
  ///   pipe->trace(timeline);
  ///   pipe->forward(x).sum().backward();
  ///   file << gpipe::to_chrome_json(*timeline);
  ///
  /// On an accelerator, each worker then waits for its device at the end of the call. Spans have the bytes in use,
  /// unless PyTorch's own profiler is active. REQUIRES: read the timeline only while no call runs.
  void trace(std::shared_ptr<Timeline> timeline);

  /// Whether no mini-batch and no graph uses the pipeline.
  bool idle() const { return pipeline_.use_count() == 1; }

  /// Whether the stages share the same parameters as when this was made. If not, make a new pipeline.
  bool ties_unchanged() const;

  /// The calls that the ranks make together, besides the training.
  TeamCalls team() { return {*this, *pipeline_}; }

  /// A name in the state of the whole model, its stage, and the first name of the same tensor in the list.
  struct StateName {
    std::string name;
    int stage;
    std::string first;
  };
  /// The names of the whole model's parameters and buffers, in its order.
  const std::vector<StateName>& parameter_names() const { return parameter_names_; }
  const std::vector<StateName>& buffer_names() const { return buffer_names_; }

  /// Returns the program of step() for a number of micro-batches, to simulate or draw. Errors: std::invalid_argument
  /// for a number that is not positive, means more than kMostCells cells, or does not fit the schedule.
  std::shared_ptr<const Program> program(int micro_batches) const;

  /// Loads the state of the unpartitioned model, saved from any device. Parameters and buffers stay on their devices.
  /// Errors: std::invalid_argument for a tensor of another shape or dtype, before anything has changed.
  void load(torch::serialize::InputArchive& archive) override;

  /// Throws c10::TypeError, because parameters stay on the stages' devices. to(dtype) is allowed.
  void to(torch::Device device, torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Device device, bool non_blocking = false) override;
  using torch::nn::Module::to;

 private:
  /// All others delegate to this one.
  GPipeImpl(LayerFactories factories, std::vector<std::int64_t> balance, GPipeOptions options, LanguageBinding binding);
  std::int64_t least_samples() const;  // of a micro-batch
  Value run(Value input, std::int64_t chunks, std::int64_t split_size, const Checkpoints& checkpoints);
  StepResult run_step(Value input, Value target, const LossFunction& loss, const StepOptions& options,
                      std::shared_ptr<at::Tensor> unit);

  std::vector<std::int64_t> balance_;
  GPipeOptions options_;
  std::vector<torch::Device> devices_;
  std::vector<std::pair<std::string, torch::Tensor>> across_ranks_;  // named_parameters() that other ranks have too
  std::vector<StateName> parameter_names_;
  std::vector<StateName> buffer_names_;
  bool has_batch_norm_ = false;
  std::shared_ptr<Pipeline> pipeline_;
  std::once_flag warned_;
};

}  // namespace gpipe

// LibTorch does not find an overloaded forward().
template <>
struct torch::detail::has_forward<gpipe::GPipeImpl> : std::true_type {};

namespace gpipe {

/// Module holder of GPipeImpl.
class GPipe : public torch::nn::ModuleHolder<GPipeImpl> {
 public:
  using torch::nn::ModuleHolder<GPipeImpl>::ModuleHolder;
  using Impl = GPipeImpl;

  GPipe(const torch::nn::Sequential& model, std::vector<std::int64_t> balance, GPipeOptions options = {})
      : ModuleHolder(std::make_shared<GPipeImpl>(model, std::move(balance), std::move(options))) {}
  GPipe(const NestedSequential& model, std::vector<std::int64_t> balance, GPipeOptions options = {})
      : ModuleHolder(std::make_shared<GPipeImpl>(model, std::move(balance), std::move(options))) {}
  GPipe(LayerFactories model, std::vector<std::int64_t> balance, GPipeOptions options = {})
      : ModuleHolder(std::make_shared<GPipeImpl>(std::move(model), std::move(balance), std::move(options))) {}
  GPipe(std::vector<std::unique_ptr<Layer>> layers, std::vector<std::int64_t> balance, GPipeOptions options,
        const LanguageBinding& binding)
      : ModuleHolder(std::make_shared<GPipeImpl>(std::move(layers), std::move(balance), std::move(options), binding)) {}

  /// As GPipeImpl::forward().
  template <typename... Args>
  auto operator()(Args&&... args) {
    return get()->forward(std::forward<Args>(args)...);
  }
};

}  // namespace gpipe
