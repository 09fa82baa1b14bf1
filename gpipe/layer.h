#pragma once

#include <torch/nn/modules/container/any.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "gpipe/api.h"
#include "gpipe/value.h"

namespace gpipe {

/// One child of the user's Sequential: the smallest unit that a balance counts. Takes and returns Values.
class GPIPE_API Layer {
 public:
  virtual ~Layer() = default;

  /// Errors: what the module throws; c10::Error when it does not accept the input's form.
  virtual Value forward(Value input) = 0;
  virtual const std::string& name() const = 0;
  virtual std::shared_ptr<torch::nn::Module> module() const = 0;

  /// The buffers and modes that a module has at one time. A forward may replace buffers.
  struct Buffers {
    std::vector<at::Tensor> tensors = {};  ///< undefined where a registered name has none
    /// Gives the module these buffers and modes again. Errors: std::runtime_error when a C++ module has replaced a
    /// buffer, which cannot be undone.
    std::function<void()> put_back = {};
  };
  virtual Buffers buffers() const;

  /// The parameters that the module has now.
  virtual std::vector<at::Tensor> parameters() const { return module()->parameters(); }
};

/// Whether this thread runs a layer's forward that will be recomputed. In a stage's first one, grad mode is enabled.
GPIPE_API bool is_checkpointing();
/// Whether this thread recomputes a layer's forward. A layer that counts its calls should not count this one.
GPIPE_API bool is_recomputing();

/// Wraps a child of a Sequential; shares the module. Its forward() takes and returns a tensor, a std::vector of tensors
/// or a std::tuple of 2 to 8. If it returns another type, Layer::forward() throws std::invalid_argument.
GPIPE_API std::unique_ptr<Layer> make_layer(std::string name, torch::nn::AnyModule module);

}  // namespace gpipe
