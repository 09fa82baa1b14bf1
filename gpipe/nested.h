#pragma once

#include <torch/nn/modules/container/sequential.h>

namespace gpipe {

/// A torch::nn::Sequential that can be a layer of another Sequential. Its layers take and return one tensor.
class NestedSequentialImpl : public torch::nn::SequentialImpl {
 public:
  using torch::nn::SequentialImpl::SequentialImpl;

  torch::Tensor forward(torch::Tensor input) { return torch::nn::SequentialImpl::forward(std::move(input)); }
};

/// Module holder: NestedSequential{{"conv", torch::nn::Conv2d(...)}, ...}, or from modules as torch::nn::Sequential.
class NestedSequential : public torch::nn::ModuleHolder<NestedSequentialImpl> {
 public:
  using torch::nn::ModuleHolder<NestedSequentialImpl>::ModuleHolder;

  NestedSequential() = default;
  NestedSequential(std::initializer_list<torch::nn::NamedAnyModule> named_modules)
      : ModuleHolder(std::make_shared<NestedSequentialImpl>(named_modules)) {}
};

}  // namespace gpipe
