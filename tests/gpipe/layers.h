// Layers and models to cut: functions, skips of every kind, several tensors.
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

/// Ten layers: crossing, nested and same-stage skips, with dropout between them.
inline Sequential skip_model() {
  return Sequential(Linear(6, 6), Stash("a"), StashOdd(), Linear(6, 6), Stash("b"), torch::nn::Dropout(0.3), Pop("a"),
                    Linear(6, 6), PopOdd(), Pop("b"));
}

struct EmbedImpl : torch::nn::Module {
  explicit EmbedImpl(std::int64_t width = 6) : table(register_module("table", torch::nn::Embedding(5, width))) {}
  std::tuple<Tensor, Tensor> forward(std::tuple<Tensor, Tensor> in) {
    auto& [x, ids] = in;
    return {x + table(ids), ids};
  }
  torch::nn::Embedding table;
};
TORCH_MODULE(Embed);

/// Changes its input in place, and returns the same tensor twice.
struct InPlaceImpl : torch::nn::Module {
  std::tuple<Tensor, Tensor, Tensor> forward(std::tuple<Tensor, Tensor> in) {
    auto& [x, ids] = in;
    x.relu_();
    return {x, x, ids};
  }
};
TORCH_MODULE(InPlace);

struct MixImpl : torch::nn::Module {
  explicit MixImpl(std::int64_t width = 6) : weight(register_parameter("weight", torch::randn({width}))) {}
  std::vector<Tensor> forward(std::tuple<Tensor, Tensor, Tensor> in) {
    auto& [x, y, ids] = in;
    return {x * weight, y.sigmoid() * weight + x.sin(), ids.to(x.scalar_type())};
  }
  Tensor weight;
};
TORCH_MODULE(Mix);

struct UnmixImpl : torch::nn::Module {
  Tensor forward(const std::vector<Tensor>& in) { return in[0] + in[1] * in[2].unsqueeze(1); }
};
TORCH_MODULE(Unmix);

/// Six layers: tuples, vectors, integer tensors, in-place operations at the head of a stage, dropout.
inline Sequential tuple_model() {
  return Sequential(Embed(), InPlace(), Mix(), Unmix(),
                    torch::nn::Dropout(torch::nn::DropoutOptions(0.3).inplace(true)),
                    torch::nn::ReLU(torch::nn::ReLUOptions(true)));
}

}  // namespace gpipe
