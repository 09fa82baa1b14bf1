#pragma once

#include <torch/nn/modules/container/any.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "gpipe/autograd/value.h"

namespace torch::nn {
class SequentialImpl;
}

namespace gpipe {

/// The smallest unit that the user gives: one child of the Sequential, called with a Value whatever its types are.
class Layer {
 public:
  virtual ~Layer() = default;

  /// May throw whatever the module throws; c10::Error when it does not accept the input's form.
  virtual Value forward(Value input) = 0;
  virtual const std::string& name() const = 0;
  virtual std::shared_ptr<torch::nn::Module> module() const = 0;

  /// The buffers that the module has at present, undefined where a name has none. A forward may replace them.
  virtual std::vector<at::Tensor> buffers() const;
  /// Gives the module these tensors as its buffers, in the order of buffers(). Errors: std::runtime_error when a C++
  /// module has other ones: it may write to its buffers, but not replace them.
  virtual void set_buffers(const std::vector<at::Tensor>& buffers);
};

/// What a language binding keeps of a cell from its forward until its recompute.
using CellMemo = std::shared_ptr<void>;

/// Runs several layers in a row: calls `begin` with the index of each before it runs it. `memo` belongs to the cell:
/// empty in its forward, and in its recompute what the forward left there.
using RunLayers = std::function<Value(Value input, absl::FunctionRef<void(int layer)> begin, CellMemo& memo)>;

/// A child of a torch::nn::Sequential; shares the module. Its forward() takes and returns torch::Tensor,
/// std::vector<torch::Tensor> or a std::tuple of 2 to 8 torch::Tensor; another return type is a std::invalid_argument
/// when it is called.
std::unique_ptr<Layer> make_layer(std::string name, torch::nn::AnyModule module);

/// All children of a Sequential, in order. Errors: std::invalid_argument when the Sequential itself has parameters or
/// buffers, for they belong to no layer.
std::vector<std::unique_ptr<Layer>> make_layers(const torch::nn::SequentialImpl& model);

}  // namespace gpipe
