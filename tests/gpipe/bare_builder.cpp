#include "tests/gpipe/bare_builder.h"

#include "skip/skippable.h"

namespace gpipe::bare {
namespace {

namespace nn = torch::nn;
using torch::Tensor;

struct LibrarySkipImpl : nn::Module, Skippable, SkipPort {
  LibrarySkipImpl(Names names, Builder::SkipFunction function)
      : Skippable(std::move(names)), function(std::move(function)) {}
  void stash(const std::string& name, Tensor tensor) override { Skippable::stash(name, std::move(tensor)); }
  Tensor pop(const std::string& name) override { return Skippable::pop(name); }
  Tensor forward(Tensor x) { return function(std::move(x), *this); }
  Builder::SkipFunction function;
};

struct PlainSkipImpl : nn::Module, SkipPort {
  PlainSkipImpl(PlainSkips& skips, Builder::SkipFunction function) : skips(skips), function(std::move(function)) {}
  void stash(const std::string& name, Tensor tensor) override { skips[name] = std::move(tensor); }
  Tensor pop(const std::string& name) override { return std::move(skips.extract(name).mapped()); }
  Tensor forward(Tensor x) { return function(std::move(x), *this); }
  PlainSkips& skips;
  Builder::SkipFunction function;
};

}  // namespace

void Builder::add_skip(std::vector<std::string> stashes, std::vector<std::string> pops, SkipFunction function) {
  if (plain_ != nullptr) {
    auto layer = std::make_shared<PlainSkipImpl>(*plain_, std::move(function));
    own(*layer);
    model_->push_back(std::move(layer));
  } else {
    auto layer = std::make_shared<LibrarySkipImpl>(
        Skippable::Names{.stash = std::move(stashes), .pop = std::move(pops)}, std::move(function));
    own(*layer);
    model_->push_back(std::move(layer));
  }
}

void Builder::own(nn::Module& layer) {
  int number = 0;
  const auto name = [&] { return "own" + std::to_string(number++); };
  for (auto& [parameter, requires_grad] : parameters_) layer.register_parameter(name(), parameter, requires_grad);
  for (auto& buffer : buffers_) layer.register_buffer(name(), buffer);
  for (auto& module : modules_) layer.register_module(name(), module);
  parameters_.clear();
  buffers_.clear();
  modules_.clear();
}

}  // namespace gpipe::bare
