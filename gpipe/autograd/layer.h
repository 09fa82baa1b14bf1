#pragma once

#include <torch/nn/modules/container/any.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "gpipe/tensors/value.h"

namespace torch::nn {
class SequentialImpl;
}

namespace gpipe {

/// One child of the user's Sequential: the smallest unit that a balance counts. Takes and returns Values.
class Layer {
 public:
  virtual ~Layer() = default;

  /// Errors: what the module throws; c10::Error when it does not accept the input's form.
  virtual Value forward(Value input) = 0;
  virtual const std::string& name() const = 0;
  virtual std::shared_ptr<torch::nn::Module> module() const = 0;

  /// The buffers and modes that a module has at one time. A forward may replace buffers and make submodules.
  struct Buffers {
    std::vector<at::Tensor> tensors = {};  ///< undefined where a registered name has none
    std::size_t modules = 0;               ///< the number of the module and its submodules
    /// Gives the module these buffers and modes again. Errors: std::runtime_error when a C++ module has replaced a
    /// buffer, which cannot be undone.
    std::function<void()> put_back = {};
  };
  virtual Buffers buffers() const;

  /// The parameters that the module has now. A forward may make some.
  virtual std::vector<at::Tensor> parameters() const { return module()->parameters(); }
};

/// Whether this thread runs a layer's forward that will be recomputed. In a stage's first one, grad mode is enabled.
bool is_checkpointing();
/// Whether this thread recomputes a layer's forward. A layer that counts its calls should not count this one.
bool is_recomputing();
/// Whether either holds.
bool is_recomputed();

/// Sets what is_checkpointing() and is_recomputing() return on this thread, for its lifetime.
class PassScope {
 public:
  enum class Pass { kPlain, kCheckpointing, kRecomputing };

  explicit PassScope(Pass pass);
  ~PassScope();
  PassScope(const PassScope&) = delete;

 private:
  const Pass before_;
};

/// Whether two lists hold the same tensors, in the same order.
bool are_same(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b);

/// Returns the name under which a container registers a layer's module: LibTorch allows no dots in it.
std::string registered_name(const std::string& layer);

/// Data that a language binding keeps for a cell from its forward until its recompute.
using CellMemo = std::shared_ptr<void>;

/// A parameter that another stage lends to this one, and what stands for it in a cell, on this stage's device.
struct Borrowed {
  at::Tensor parameter;
  at::Tensor stand_in;
};

/// Runs the layers of a stage in order. Must call `begin` with each layer's index in the stage before running it.
/// `memo` is null in a cell's forward; the recompute gets what the forward stored there. Layers must use the stand-in
/// of a parameter on another device, and may use other parameters directly.
using RunLayers = std::function<Value(Value input, absl::FunctionRef<void(int layer)> begin, CellMemo& memo,
                                      const std::vector<Borrowed>& borrowed)>;

/// Wraps a child of a Sequential; shares the module. Its forward() takes and returns a tensor, a std::vector of tensors
/// or a std::tuple of 2 to 8. If it returns another type, Layer::forward() throws std::invalid_argument.
std::unique_ptr<Layer> make_layer(std::string name, torch::nn::AnyModule module);

/// Wraps all children of a Sequential, in order. Errors: std::invalid_argument for parameters or buffers of its own.
std::vector<std::unique_ptr<Layer>> make_layers(const torch::nn::SequentialImpl& model);

}  // namespace gpipe
