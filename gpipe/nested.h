#pragma once

#include <torch/nn/modules/container/sequential.h>

namespace gpipe {

/// A Sequential of layers from one tensor to one tensor that can itself be a layer of a Sequential, which
/// torch::nn::Sequential cannot. Everything else is torch::nn::Sequential's.
class NestedSequentialImpl : public torch::nn::SequentialImpl {
 public:
  using torch::nn::SequentialImpl::SequentialImpl;

  torch::Tensor forward(torch::Tensor input) { return torch::nn::SequentialImpl::forward(std::move(input)); }
};

/// Holds a NestedSequentialImpl: NestedSequential{{"conv", torch::nn::Conv2d(...)}, ...} or from modules.
class NestedSequential : public torch::nn::ModuleHolder<NestedSequentialImpl> {
 public:
  using torch::nn::ModuleHolder<NestedSequentialImpl>::ModuleHolder;

  NestedSequential() = default;
  NestedSequential(std::initializer_list<torch::nn::NamedAnyModule> named_modules)
      : ModuleHolder(std::make_shared<NestedSequentialImpl>(torch::OrderedDict<std::string, torch::nn::AnyModule>([&] {
          torch::OrderedDict<std::string, torch::nn::AnyModule> modules;
          for (const auto& named : named_modules) modules.insert(named.name(), named.module());
          return modules;
        }()))) {}
};

}  // namespace gpipe
