#pragma once

#include <torch/torch.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace gpipe::bare {

constexpr std::int64_t kWidth = 4;

/// Where a layer puts its skips and gets them.
struct SkipPort {
  virtual ~SkipPort() = default;
  virtual void stash(const std::string& name, torch::Tensor tensor) = 0;
  virtual torch::Tensor pop(const std::string& name) = 0;
};

/// The skips of a model that has nothing of the library.
using PlainSkips = std::map<std::string, torch::Tensor>;

template <class Out, class In>
struct FunctionLayer : torch::nn::Module {
  explicit FunctionLayer(std::function<Out(In)> function) : function(std::move(function)) {}
  Out forward(In in) { return function(std::move(in)); }
  std::function<Out(In)> function;
};

/// Builds a model. With `plain`, layers that stash or pop use that; without, they are the library's Skippables.
class Builder {
 public:
  explicit Builder(PlainSkips* plain) : plain_(plain) {}

  /// What the next layer will own.
  torch::Tensor parameter(torch::IntArrayRef shape, bool requires_grad = true) {
    parameters_.emplace_back(torch::randn(shape) / 2, requires_grad);
    return parameters_.back().first;
  }
  torch::Tensor buffer(torch::Tensor tensor) { return buffers_.emplace_back(std::move(tensor)); }
  template <class Holder>
  Holder module(Holder holder) {
    modules_.push_back(holder.ptr());
    return holder;
  }

  /// A layer that calls a function of one tensor, tuple or vector.
  template <class Function>
  void add(Function function) {
    add_layer(std::function(std::move(function)));
  }
  using SkipFunction = std::function<torch::Tensor(torch::Tensor, SkipPort&)>;
  void add_skip(std::vector<std::string> stashes, std::vector<std::string> pops, SkipFunction function);
  /// One of LibTorch's own.
  template <class Holder>
  void push(Holder holder) {
    model_->push_back(std::move(holder));
  }

  torch::nn::Sequential model() const { return model_; }

 private:
  template <class Out, class In>
  void add_layer(std::function<Out(In)> function) {
    auto layer = std::make_shared<FunctionLayer<Out, In>>(std::move(function));
    own(*layer);
    model_->push_back(std::move(layer));
  }
  void own(torch::nn::Module& layer);

  PlainSkips* plain_;
  torch::nn::Sequential model_;
  std::vector<std::pair<torch::Tensor, bool>> parameters_;
  std::vector<torch::Tensor> buffers_;
  std::vector<std::shared_ptr<torch::nn::Module>> modules_;
};

/// One or more layers, from a tensor [samples, kWidth] to another.
struct Unit {
  enum class Role { kWhole, kStash, kPop, kStashOdd, kPopOdd };

  const char* name;
  void (*build)(Builder& builder, int variant, const std::string& skip);
  bool in_place = false;  ///< changes what it gets
  bool shares = false;    ///< passes on, or stashes, several tensors that share memory
  Role role = Role::kWhole;
};

const std::vector<Unit>& units();

/// How many variants a unit has; `variant` is taken modulo what the unit knows.
constexpr int kVariants = 4;

}  // namespace gpipe::bare
