// Builds a model for a pipeline, or the same model with layers that use nothing of the library.
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/gpipe/layers.h"

namespace gpipe::bare {

/// How a layer stashes and pops its skips.
struct SkipPort {
  virtual ~SkipPort() = default;
  virtual void stash(const std::string& name, torch::Tensor tensor) = 0;
  virtual torch::Tensor pop(const std::string& name) = 0;
};

/// The skips of a plain model.
using PlainSkips = std::map<std::string, torch::Tensor>;

/// Makes layers that keep their skips in `plain` or, if that is nullptr, Skippable layers of the library.
class Builder {
 public:
  explicit Builder(PlainSkips* plain) : plain_(plain) {}

  /// Makes or adds a tensor or module that the next layer will own.
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

  /// Adds a layer that calls a function of one tensor, tuple or vector.
  template <class Function>
  void add(Function function) {
    auto layer = function_layer(std::move(function));
    own(*layer);
    model_->push_back(std::move(layer));
  }
  using SkipFunction = std::function<torch::Tensor(torch::Tensor, SkipPort&)>;
  void add_skip(std::vector<std::string> stashes, std::vector<std::string> pops, SkipFunction function);
  /// Adds a module of LibTorch.
  template <class Holder>
  void push(Holder holder) {
    model_->push_back(std::move(holder));
  }

  torch::nn::Sequential model() const { return model_; }

 private:
  void own(torch::nn::Module& layer);

  PlainSkips* plain_;
  torch::nn::Sequential model_;
  std::vector<std::pair<torch::Tensor, bool>> parameters_;
  std::vector<torch::Tensor> buffers_;
  std::vector<std::shared_ptr<torch::nn::Module>> modules_;
};

}  // namespace gpipe::bare
