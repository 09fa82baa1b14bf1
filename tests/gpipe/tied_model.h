// A model whose layers share a parameter.
#pragma once

#include "tests/gpipe/helpers.h"

namespace gpipe {

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
