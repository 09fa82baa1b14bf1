// Layers and models to cut: functions, skips of every kind, a shared parameter.
#pragma once

#include "tests/gpipe/helpers.h"

namespace gpipe {

template <class Out, class In>
struct FunctionLayer : torch::nn::Module {
  explicit FunctionLayer(std::function<Out(In)> function) : function(std::move(function)) {}
  Out forward(In in) { return function(std::move(in)); }
  std::function<Out(In)> function;
};

/// A layer that calls a function of one tensor, vector or tuple.
template <class Function>
auto function_layer(Function function) {
  using Layer = decltype(FunctionLayer(std::function(function)));
  return std::make_shared<Layer>(std::move(function));
}

/// Calls a module, which it can lose.
template <class Inner>
struct Outer : torch::nn::Module {
  explicit Outer(Inner module) : inner(register_module("inner", std::move(module))) {}
  Tensor forward(Tensor x) { return inner->forward(std::move(x)); }
  using torch::nn::Module::unregister_module;
  Inner inner;
};

/// A layer that calls a function, which stashes and pops skips, or breaks their declaration.
struct SkipFunctionImpl : torch::nn::Module, Skippable {
  using Function = std::function<Tensor(Tensor x, SkipFunctionImpl& skips)>;
  SkipFunctionImpl(Names names, Function function) : Skippable(std::move(names)), function(std::move(function)) {}
  Tensor forward(Tensor x) { return function(std::move(x), *this); }
  using Skippable::peek;
  using Skippable::pop;
  using Skippable::stash;
  Function function;
};
TORCH_MODULE(SkipFunction);

struct StashImpl : SkipFunctionImpl {
  explicit StashImpl(const std::string& name, double factor = 1.5)
      : SkipFunctionImpl({.stash = {name}}, [=](Tensor x, SkipFunctionImpl& skips) {
          skips.stash(name, x);
          return factor == 1 ? x : x * factor;
        }) {}
};
TORCH_MODULE(Stash);

struct PopImpl : SkipFunctionImpl {
  using Join = Tensor (*)(Tensor x, Tensor skip);
  explicit PopImpl(
      const std::string& name, Join join = [](Tensor x, Tensor skip) { return x + skip.tanh(); })
      : SkipFunctionImpl({.pop = {name}},
                         [=](Tensor x, SkipFunctionImpl& skips) { return join(std::move(x), skips.pop(name)); }) {}
};
TORCH_MODULE(Pop);

struct PeekImpl : SkipFunctionImpl {
  explicit PeekImpl(const std::string& name)
      : SkipFunctionImpl({.peek = {name}},
                         [=](Tensor x, SkipFunctionImpl& skips) { return x * skips.peek(name).sigmoid(); }) {}
};
TORCH_MODULE(Peek);

/// Stashes integers, an undefined tensor and a floating tensor that is popped but not used.
struct StashOddImpl : SkipFunctionImpl {
  StashOddImpl()
      : SkipFunctionImpl({.stash = {"ids", "nothing", "unused"}}, [](Tensor x, SkipFunctionImpl& skips) {
          skips.stash("ids", (x.detach() > 0).to(torch::kLong));
          skips.stash("nothing", Tensor());
          skips.stash("unused", x * 2);
          return x;
        }) {}
};
TORCH_MODULE(StashOdd);

struct PopOddImpl : SkipFunctionImpl {
  PopOddImpl()
      : SkipFunctionImpl({.pop = {"ids", "nothing", "unused"}}, [](Tensor x, SkipFunctionImpl& skips) {
          skips.pop("unused");
          TORCH_CHECK(!skips.pop("nothing").defined());
          return x + skips.pop("ids").to(x.scalar_type());
        }) {}
};
TORCH_MODULE(PopOdd);

inline Sequential mlp() { return Sequential(Linear(6, 6), torch::nn::Tanh(), Linear(6, 6), torch::nn::Tanh()); }

/// A layer whose only parameter is that of another layer.
struct SharerImpl : torch::nn::Module {
  using Forward = std::function<Tensor(const Tensor& x, const Tensor& weight)>;
  SharerImpl(const Tensor& of_other, Forward function)
      : weight(register_parameter("weight", of_other, of_other.requires_grad())), function(std::move(function)) {}
  Tensor forward(const Tensor& x) { return function(x, weight); }
  Tensor weight;
  Forward function;
};
TORCH_MODULE(Sharer);

inline Tensor mix(const Tensor& x, const Tensor& weight) { return x + x.matmul(weight.t()).tanh().matmul(weight); }
inline Tensor project(const Tensor& x, const Tensor& weight) { return x.matmul(weight.t()); }

inline constexpr std::int64_t kWords = 11;

/// Seven layers. The first, the third and the last share a matrix.
inline Sequential tied_model(torch::Dtype dtype = torch::kFloat64, std::int64_t width = 6) {
  torch::manual_seed(1);
  torch::nn::Embedding words(kWords, width);
  Sequential model(words, Linear(width, width), Sharer(words->weight, mix), torch::nn::Tanh(), Linear(width, width),
                   torch::nn::Tanh(), Sharer(words->weight, project));
  model->to(dtype);
  return model;
}

inline Tensor words_of(std::int64_t samples) {
  torch::manual_seed(2);
  return torch::randint(kWords, {samples});
}
inline Tensor next_words(const Tensor& words) { return (words * 7 + 3) % kWords; }

inline const LossFunction kCrossEntropy =
    tensor_loss([](const Tensor& out, const Tensor& t) { return torch::cross_entropy_loss(out, t); });

}  // namespace gpipe
