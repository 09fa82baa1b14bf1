#include "tests/gpipe/bare_units.h"

#include <optional>
#include <tuple>

namespace gpipe::bare {
namespace {

namespace nn = torch::nn;
using torch::Tensor;
using Pair = std::tuple<Tensor, Tensor>;
using Four = std::tuple<Tensor, Tensor, Tensor, Tensor>;
using Tensors = std::vector<Tensor>;
using Role = Unit::Role;

Tensor ids_of(const Tensor& x) { return x.detach().select(1, 0).mul(10).abs().to(torch::kLong).remainder(5); }

struct CubeFunction : torch::autograd::Function<CubeFunction> {
  static Tensor forward(torch::autograd::AutogradContext* context, Tensor x) {
    context->save_for_backward({x});
    return x * x.tanh();
  }
  static Tensors backward(torch::autograd::AutogradContext* context, Tensors gradients) {
    const auto x = context->get_saved_variables()[0];
    const auto t = x.tanh();
    return {gradients[0] * (t + x * (1 - t * t))};
  }
};

void pass_pairs(Builder& b, int layers) {
  for (; layers > 0; --layers) b.add([](Pair in) -> Pair { return in; });
}

void alias(Builder& b, int variant, bool change) {
  b.add([](Tensor x) -> Pair { return {x, x}; });
  pass_pairs(b, variant % 2);
  if (change) {
    const auto w = b.parameter({kWidth});
    b.add([w, first = variant < 2](Pair in) -> Pair {
      (first ? std::get<0>(in) : std::get<1>(in)).add_(w);
      return in;
    });
  }
  pass_pairs(b, variant % 2);
  b.add([](Pair in) { return std::get<0>(in) * 2 + std::get<1>(in).sin(); });
}

void base_and_view(Builder& b, int variant, bool change) {
  b.add([](Tensor x) -> Pair { return {x, x.narrow(1, 0, 2)}; });
  pass_pairs(b, variant % 2);
  if (change) {
    const auto w = b.parameter({1});
    b.add([w, base = variant < 2](Pair in) -> Pair {
      (base ? std::get<0>(in) : std::get<1>(in)).add_(w);
      return in;
    });
  }
  pass_pairs(b, variant % 2);
  b.add([](Pair in) { return std::get<0>(in) + torch::cat({std::get<1>(in), std::get<1>(in)}, 1).sin(); });
}

// The output depends on a moving average over the micro-batches so far.
void ema(Builder& b, int variant, const std::string&) {
  const auto mean = b.buffer(torch::zeros({kWidth}));
  b.add([mean, variant](Tensor x) {
    const auto update = [&] { mean.mul_(0.9).add_(x.detach().mean(0), 0.1); };
    if (variant % 2 == 0) update();
    const auto y = variant < 2 ? x + mean : x * (1 + mean.clone());
    if (variant % 2 == 1) update();
    return y;
  });
}

void step_counter(Builder& b, int variant, const std::string&) {
  const auto steps = b.buffer(torch::zeros({}, torch::kLong));
  b.add([steps, variant](Tensor x) {
    steps.add_(1);
    return variant % 2 == 0 ? x / steps.to(torch::kDouble) : x + 0.1 * steps.item<double>();
  });
}

void batch_norm(Builder& b, int variant, bool eval) {
  nn::BatchNormOptions options(1);
  if (variant % 2 == 1) options.momentum(std::nullopt);
  options.affine(variant < 2);
  auto norm = b.module(nn::BatchNorm1d(options));
  b.add([norm, eval](Tensor x) mutable {
    if (eval) norm->eval();
    return norm(x.unsqueeze(1)).squeeze(1);
  });
}

void embedding(Builder& b, nn::EmbeddingOptions options) {
  auto table = b.module(nn::Embedding(options));
  b.add([table](Tensor x) mutable { return x + table(ids_of(x)); });
}

template <class Network>
void recurrent(Builder& b, Network network) {
  b.module(network);
  b.add([network](Tensor x) mutable { return std::get<0>(network(x.unsqueeze(2))).select(1, kWidth - 1); });
}

void attention(Builder& b, int, const std::string&) {
  auto attend = b.module(nn::MultiheadAttention(nn::MultiheadAttentionOptions(kWidth, 2)));
  b.add([attend](Tensor x) mutable {
    const auto words = torch::stack({x, x.flip(1), x * 0.5});
    return std::get<0>(attend(words, words, words)).mean(0);
  });
}

// Adds -dE/dx, which the backward differentiates again.
void forces(Builder& b, int, const std::string&) {
  auto potential = b.module(nn::Linear(kWidth, kWidth));
  b.add([potential](Tensor x) mutable {
    torch::AutoGradMode grad(true);
    const auto place = x.detach().requires_grad_();
    const auto energy = potential(place).tanh().square().sum();
    return x - torch::autograd::grad({energy}, {place}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0];
  });
}

void branch(Builder& b, int, const std::string&) {
  const auto positive = b.parameter({kWidth});
  const auto negative = b.parameter({kWidth});
  b.add([positive, negative](Tensor x) {
    return x.detach().sum().item<double>() > 0 ? x * positive : x.sin() + negative;
  });
}

void several_tensors(Builder& b, int variant, const std::string&) {
  b.add([](Tensor x) -> Four { return {x * 2, ids_of(x), x.to(torch::kFloat), x.detach() > 0}; });
  if (variant % 2 == 1) b.add([](Four in) -> Four { return in; });
  auto table = b.module(nn::Embedding(5, kWidth));
  b.add([table](Four in) mutable -> Tensors {
    auto& [x, ids, single, mask] = in;
    return {x + table(ids), single * 2, mask, ids};
  });
  if (variant < 2) b.add([](Tensors in) -> Tensors { return in; });
  b.add([](Tensors in) { return torch::where(in[2], in[0], in[1].to(torch::kDouble)) * (1 + in[3].unsqueeze(1)); });
}

void stash_odd(Builder& b, int, const std::string&) {
  b.add_skip({"ids", "nothing", "unused"}, {}, [](Tensor x, SkipPort& skips) {
    skips.stash("ids", ids_of(x));
    skips.stash("nothing", Tensor());
    skips.stash("unused", x * 2);
    return x;
  });
}

void pop_odd(Builder& b, int, const std::string&) {
  auto table = b.module(nn::Embedding(5, kWidth));
  b.add_skip({}, {"ids", "nothing", "unused"}, [table](Tensor x, SkipPort& skips) mutable {
    skips.pop("unused");
    TORCH_CHECK(!skips.pop("nothing").defined());
    return x + table(skips.pop("ids"));
  });
}

void two_linears(Builder& b, int, const std::string&) {
  auto linear = b.module(nn::Linear(kWidth, kWidth));
  b.module(linear);
  b.add([linear](Tensor x) mutable { return linear(linear(x).tanh()); });
}

std::vector<Unit> all_units() {
  return {
      {"linear", [](Builder& b, int, const std::string&) { b.push(nn::Linear(kWidth, kWidth)); }},
      {"tanh", [](Builder& b, int, const std::string&) { b.push(nn::Tanh()); }},
      {"identity", [](Builder& b, int, const std::string&) { b.push(nn::Identity()); }},
      {"layer norm",
       [](Builder& b, int, const std::string&) { b.push(nn::LayerNorm(nn::LayerNormOptions({kWidth}))); }},
      {"relu_", [](Builder& b, int, const std::string&) { b.push(nn::ReLU(nn::ReLUOptions(true))); }, true},
      {"mul_", [](Builder& b, int, const std::string&) { b.add([](Tensor x) { return x.mul_(1.5); }); }, true},
      {"add_ a parameter",
       [](Builder& b, int, const std::string&) {
         const auto w = b.parameter({kWidth});
         b.add([w](Tensor x) { return x.add_(w); });
       },
       true},
      {"in place on a view",
       [](Builder& b, int variant, const std::string&) {
         const auto w = b.parameter({2});
         b.add([w, variant](Tensor x) {
           auto view = x.narrow(1, variant % 3, 2);
           variant < 2 ? view.add_(w) : view.relu_();
           return x;
         });
       },
       true},
      {"slices assigned",
       [](Builder& b, int, const std::string&) {
         const auto w = b.parameter({2});
         b.add([w](Tensor x) {
           auto y = torch::zeros_like(x);
           y.narrow(1, 0, 2).copy_(x.narrow(1, 2, 2));
           y.narrow(1, 2, 2).copy_(x.narrow(1, 0, 2) * w);
           return y;
         });
       }},
      {"view",
       [](Builder& b, int variant, const std::string&) {
         b.add([](Tensor x) { return x.view({-1, 2, 2}); });
         if (variant < 2) b.push(nn::ReLU(nn::ReLUOptions(true)));
         b.add([](Tensor x) { return x.flatten(1); });
       },
       true},
      {"alias", [](Builder& b, int variant, const std::string&) { alias(b, variant, false); }, false, true},
      {"alias changed", [](Builder& b, int variant, const std::string&) { alias(b, variant, true); }, true, true},
      {"base and view", [](Builder& b, int variant, const std::string&) { base_and_view(b, variant, false); }, false,
       true},
      {"base and view changed", [](Builder& b, int variant, const std::string&) { base_and_view(b, variant, true); },
       true, true},
      {"ema", ema},
      {"step counter", step_counter},
      {"batch norm", [](Builder& b, int variant, const std::string&) { batch_norm(b, variant, false); }},
      {"batch norm in eval", [](Builder& b, int variant, const std::string&) { batch_norm(b, variant, true); }},
      {"unused parameter",
       [](Builder& b, int, const std::string&) {
         b.parameter({kWidth});
         b.add([](Tensor x) { return x.sin(); });
       }},
      {"branch", branch},
      {"frozen parameter",
       [](Builder& b, int, const std::string&) {
         const auto w = b.parameter({kWidth}, false);
         b.add([w](Tensor x) { return x * w; });
       }},
      {"weight twice",
       [](Builder& b, int, const std::string&) {
         const auto w = b.parameter({kWidth, kWidth});
         b.add([w](Tensor x) { return x.mm(w).tanh().mm(w.t()); });
       }},
      {"module twice", two_linears},
      {"shared gradient",
       [](Builder& b, int, const std::string&) {
         const auto v = b.parameter({1, kWidth});
         const auto w = b.parameter({1, kWidth});
         b.add([v, w](Tensor x) { return x + (v + w); });
       }},
      {"shared gradient viewed",
       [](Builder& b, int, const std::string&) {
         const auto v = b.parameter({1, kWidth});
         const auto w = b.parameter({kWidth});
         b.add([v, w](Tensor x) { return x + (v + w.view({1, kWidth})); });
       }},
      {"parameter alone",
       [](Builder& b, int, const std::string&) {
         const auto w = b.parameter({kWidth});
         b.add([w](Tensor x) { return w.expand({x.size(0), kWidth}); });
       }},
      {"embedding", [](Builder& b, int, const std::string&) { embedding(b, nn::EmbeddingOptions(5, kWidth)); }},
      {"sparse embedding",
       [](Builder& b, int, const std::string&) { embedding(b, nn::EmbeddingOptions(5, kWidth).sparse(true)); }},
      {"embedding max_norm",
       [](Builder& b, int, const std::string&) { embedding(b, nn::EmbeddingOptions(5, kWidth).max_norm(1.0)); }},
      {"gru",
       [](Builder& b, int, const std::string&) { recurrent(b, nn::GRU(nn::GRUOptions(1, kWidth).batch_first(true))); }},
      {"lstm",
       [](Builder& b, int, const std::string&) {
         recurrent(b, nn::LSTM(nn::LSTMOptions(1, kWidth).batch_first(true).num_layers(2)));
       }},
      {"attention", attention},
      {"convolution",
       [](Builder& b, int, const std::string&) {
         auto conv = b.module(nn::Conv1d(nn::Conv1dOptions(1, 1, 3).padding(1)));
         b.add([conv](Tensor x) mutable { return conv(x.unsqueeze(1)).squeeze(1); });
       }},
      {"detach a part",
       [](Builder& b, int, const std::string&) {
         b.add([](Tensor x) { return torch::cat({x.narrow(1, 0, 2).detach(), x.narrow(1, 2, 2)}, 1); });
       }},
      {"detach",
       [](Builder& b, int variant, const std::string&) {
         const auto w = b.parameter({kWidth});
         b.add([w, variant](Tensor x) { return variant == 0 ? (x * w).detach() : x.detach() * w; });
       }},
      {"no grad inside",
       [](Builder& b, int, const std::string&) {
         const auto w = b.parameter({kWidth});
         b.add([w](Tensor x) {
           Tensor y;
           {
             torch::NoGradGuard no_grad;
             y = x * w;
           }
           return x + y;
         });
       }},
      {"forces", forces},
      {"several tensors", several_tensors},
      {"complex",
       [](Builder& b, int, const std::string&) {
         b.add([](Tensor x) { return torch::view_as_complex(x.reshape({-1, 2, 2}).contiguous()); });
         b.add([](Tensor z) { return z * z; });
         b.add([](Tensor z) { return torch::view_as_real(z).flatten(1); });
       }},
      {"expanded",
       [](Builder& b, int, const std::string&) { b.add([](Tensor x) { return x.mean(1, true).expand_as(x); }); }},
      {"transposed",
       [](Builder& b, int, const std::string&) { b.add([](Tensor x) { return (x.t().contiguous() * 2).t(); }); }},
      {"own function",
       [](Builder& b, int, const std::string&) { b.add([](Tensor x) { return CubeFunction::apply(x); }); }},
      {"hook",
       [](Builder& b, int, const std::string&) {
         b.add([](Tensor x) {
           auto y = x * 1.5;
           if (y.requires_grad()) y.register_hook([](Tensor gradient) { return gradient * 2; });
           return y;
         });
       }},
      {"stash",
       [](Builder& b, int, const std::string& skip) {
         b.add_skip({skip}, {}, [skip](Tensor x, SkipPort& skips) {
           skips.stash(skip, x);
           return x * 1.5;
         });
       },
       false, false, Role::kStash},
      {"stash the activation",
       [](Builder& b, int, const std::string& skip) {
         b.add_skip({skip}, {}, [skip](Tensor x, SkipPort& skips) {
           skips.stash(skip, x);
           return x;
         });
       },
       false, true, Role::kStash},
      {"stash a product",
       [](Builder& b, int, const std::string& skip) {
         const auto w = b.parameter({kWidth});
         b.add_skip({skip}, {}, [skip, w](Tensor x, SkipPort& skips) {
           skips.stash(skip, x * w);
           return x;
         });
       },
       false, false, Role::kStash},
      {"pop",
       [](Builder& b, int, const std::string& skip) {
         b.add_skip({}, {skip}, [skip](Tensor x, SkipPort& skips) { return x + skips.pop(skip).tanh(); });
       },
       false, false, Role::kPop},
      {"pop in place",
       [](Builder& b, int, const std::string& skip) {
         b.add_skip({}, {skip}, [skip](Tensor x, SkipPort& skips) { return x += skips.pop(skip); });
       },
       true, false, Role::kPop},
      {"pop and change",
       [](Builder& b, int, const std::string& skip) {
         b.add_skip({}, {skip}, [skip](Tensor x, SkipPort& skips) { return x + skips.pop(skip).mul_(0.5); });
       },
       true, false, Role::kPop},
      {"stash odd", stash_odd, false, false, Role::kStashOdd},
      {"pop odd", pop_odd, false, false, Role::kPopOdd},
  };
}

}  // namespace

const std::vector<Unit>& units() {
  static const auto* all = new std::vector<Unit>(all_units());
  return *all;
}

}  // namespace gpipe::bare
