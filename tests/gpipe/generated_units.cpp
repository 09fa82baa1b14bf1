#include "tests/gpipe/generated_units.h"

#include <ATen/CPUGeneratorImpl.h>

#include <future>

#include "absl/cleanup/cleanup.h"
#include "tests/gpipe/instruments.h"

// Of LeakSanitizer, in builds that have it.
extern "C" __attribute__((weak)) void __lsan_disable();
extern "C" __attribute__((weak)) void __lsan_enable();

namespace gpipe {

namespace nn = torch::nn;

Tensor Builder::parameter(torch::IntArrayRef shape, bool requires_grad) {
  const auto parameter = torch::randn(shape) / std::sqrt(static_cast<double>(width));
  return own_->register_parameter(new_name(), parameter, requires_grad);
}

Tensor Builder::shared_matrix() {
  auto& matrix = shared_[pair];
  if (matrix.defined()) return own_->register_parameter(new_name(), matrix, matrix.requires_grad());
  return matrix = parameter({width, width}, /*requires_grad=*/variant != 3);
}

namespace {

using TensorPair = std::tuple<Tensor, Tensor>;
using Four = std::tuple<Tensor, Tensor, Tensor, Tensor>;
using Tensors = std::vector<Tensor>;

Tensor ids_of(const Tensor& x) { return x.detach().select(1, 0).mul(10).abs().to(torch::kLong).remainder(5); }

/// A product with a constant. Counts its backwards, which are in the constant's precision outside of autocast.
struct OwnFunction : torch::autograd::Function<OwnFunction> {
  struct Constants {
    Tensor matrix;
    Tensor runs;
  };
  static Tensor forward(torch::autograd::AutogradContext* context, Tensor x, const Constants& constants) {
    context->saved_data["matrix"] = constants.matrix;
    context->saved_data["runs"] = constants.runs;
    return x.mm(constants.matrix);
  }
  static Tensors backward(torch::autograd::AutogradContext* context, Tensors gradients) {
    context->saved_data["runs"].toTensor().add_(1);
    const auto matrix = context->saved_data["matrix"].toTensor();
    return {gradients[0].to(matrix.scalar_type()).mm(matrix.t()), Tensor()};
  }
};

/// Runs a backward of its own in its backward, as a reentrant checkpoint does.
struct Reentrant : torch::autograd::Function<Reentrant> {
  struct Weight {
    Tensor tensor;
  };
  static Tensor run(const Tensor& x, const Tensor& weight) { return (x * weight).tanh(); }
  static Tensor forward(torch::autograd::AutogradContext* context, Tensor x, const Weight& weight) {
    context->save_for_backward({x});
    context->saved_data["weight"] = weight.tensor;
    return run(x, weight.tensor);
  }
  static Tensors backward(torch::autograd::AutogradContext* context, Tensors gradients) {
    const torch::AutoGradMode grad_mode(true);
    const auto x = context->get_saved_variables()[0].detach().requires_grad_();
    torch::autograd::backward({run(x, context->saved_data["weight"].toTensor())}, gradients);
    return {x.grad(), Tensor()};
  }
};

/// Two layers that make and join a pair, and between them layers that pass it on, and one that may change it. The pair
/// is a tensor twice, or a tensor and its first half.
void pair_of_tensors(Builder& b, bool has_half, bool change) {
  const auto pass_on = [&] {
    if (b.variant % 2 == 1) b.add([](TensorPair in) -> TensorPair { return in; });
  };
  b.add([has_half](Tensor x) -> TensorPair { return {x, has_half ? x.narrow(1, 0, x.size(1) / 2) : x}; });
  pass_on();
  if (change) {
    const auto w = b.parameter({has_half ? 1 : b.width});
    b.add([w, first = b.variant < 2](TensorPair in) -> TensorPair {
      (first ? std::get<0>(in) : std::get<1>(in)).add_(w);
      return in;
    });
  }
  pass_on();
  b.add([has_half](TensorPair in) {
    const auto& [x, y] = in;
    return has_half ? x + torch::cat({y, y}, 1).sin() : x * 2 + y.sin();
  });
}

// The mask must not require grad where it is passed on.
void mask(Builder& b) {
  const auto pass_on = [](TensorPair in) -> TensorPair {
    const auto& [x, mask] = in;
    TORCH_CHECK(!mask.requires_grad(), "the mask requires grad");
    return {x * mask * 2, mask};
  };
  b.add([](Tensor x) -> TensorPair { return {x, x.detach().gt(0).to(x.scalar_type())}; });
  b.add(pass_on);
  if (b.variant < 2) b.add(pass_on);
  b.add([](TensorPair in) { return std::get<0>(in) * std::get<1>(in); });
}

// A layer changes one of two tensors that share memory, but do not overlap.
void halves(Builder& b) {
  b.add([](Tensor x) -> TensorPair {
    const auto y = (x * 1.5).contiguous();
    const auto half = y.size(0) / 2;
    return {y.slice(0, 0, half), y.slice(0, half)};
  });
  b.add([](TensorPair in) { return torch::cat({std::get<0>(in).mul_(2).exp(), std::get<1>(in).sin()}); });
}

// The output depends on a moving average over the micro-batches so far.
void moving_average(Builder& b) {
  const auto mean = b.buffer(torch::zeros({b.width}));
  b.add([mean, variant = b.variant](Tensor x) {
    const auto update = [&] { mean.mul_(0.9).add_(x.detach().mean(0), 0.1); };
    if (variant % 2 == 0) update();
    const auto y = variant < 2 ? x + mean : x * (1 + mean.clone());
    if (variant % 2 == 1) update();
    return y;
  });
}

void step_counter(Builder& b) {
  const auto steps = b.buffer(torch::zeros({}, torch::kLong));
  b.add([steps, divides = b.variant % 2 == 0](Tensor x) {
    steps.add_(1);
    return divides ? x / steps.to(x.scalar_type()) : x + 0.1 * steps.item<double>();
  });
}

void batch_norm(Builder& b, bool eval, bool twice = false) {
  nn::BatchNormOptions options(1);
  if (b.variant % 2 == 1) options.momentum(std::nullopt);
  options.affine(b.variant < 2);
  auto norm = b.module(nn::BatchNorm1d(options));
  b.add([norm, eval, twice](Tensor x) mutable {
    if (eval) norm->eval();
    if (twice) x = norm(x.sin().unsqueeze(1)).squeeze(1);
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
  b.add([network](Tensor x) mutable { return std::get<0>(network(x.view({-1, 2, x.size(1) / 2}))).select(1, 1); });
}

void attention(Builder& b) {
  auto attend = b.module(nn::MultiheadAttention(nn::MultiheadAttentionOptions(b.width, 2)));
  b.add([attend](Tensor x) mutable {
    const auto words = torch::stack({x, x.flip(1), x * 0.5});
    return std::get<0>(attend(words, words, words)).mean(0);
  });
}

// Adds -dE/dx, which the backward differentiates again.
void forces(Builder& b) {
  auto potential = b.module(nn::Linear(b.width, b.width));
  b.add([potential](Tensor x) mutable {
    torch::AutoGradMode grad(true);
    const auto place = x.detach().requires_grad_();
    const auto energy = potential(place).tanh().square().sum();
    return x - torch::autograd::grad({energy}, {place}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0];
  });
}

void several_tensors(Builder& b) {
  b.add([](Tensor x) -> Four { return {x * 2, ids_of(x), x.to(torch::kFloat), x.detach() > 0}; });
  if (b.variant % 2 == 1) b.add([](Four in) -> Four { return in; });
  auto table = b.module(nn::Embedding(5, b.width));
  b.add([table](Four in) mutable -> Tensors {
    auto& [x, ids, single, mask] = in;
    return {x + table(ids), single * 2, mask, ids};
  });
  if (b.variant < 2) b.add([](Tensors in) -> Tensors { return in; });
  b.add(
      [](Tensors in) { return torch::where(in[2], in[0], in[1].to(in[0].scalar_type())) * (1 + in[3].unsqueeze(1)); });
}

// Integers, an operation in place at the head of a layer, and a tensor returned twice.
void tuple_layers(Builder& b) {
  b.add([](Tensor x) -> TensorPair { return {x * 1, ids_of(x)}; });
  b.add([](TensorPair in) -> std::tuple<Tensor, Tensor, Tensor> {
    auto& [x, ids] = in;
    x.relu_();
    return {x, x, ids};
  });
  b.add([w = b.parameter({b.width})](std::tuple<Tensor, Tensor, Tensor> in) {
    auto& [x, y, ids] = in;
    return x * w + (y.sigmoid() * w + x.sin()) * ids.unsqueeze(1);
  });
}

void in_place_on_a_view(Builder& b) {
  const auto half = b.width / 2;
  const auto w = b.parameter({half});
  b.add([=, variant = b.variant](Tensor x) {
    auto view = x.narrow(1, variant % 3, half);
    variant < 2 ? view.add_(w) : view.relu_();
    return x;
  });
}

Tensor product_without_graph(const Tensor& x, const Tensor& w) {
  torch::NoGradGuard no_grad;
  return x * w;
}

using Function = Tensor (*)(Tensor x, const Tensor& w);

/// A unit of a layer that calls a function of its input.
template <class OfInput>
Unit of_input(const char* name, OfInput function, int flags = 0) {
  return {name, [=](Builder& b) { b.add(function); }, flags};
}
/// A unit of a layer that calls a function of its input and a parameter. `shape` counts widths.
Unit of_parameter(const char* name, const std::vector<double>& shape, Function function, int flags = 0) {
  return {name,
          [=](Builder& b) {
            std::vector<std::int64_t> sizes;
            for (const auto widths : shape) sizes.push_back(static_cast<std::int64_t>(widths * b.width));
            b.add([w = b.parameter(sizes), function](Tensor x) { return function(std::move(x), w); });
          },
          flags};
}
Unit of_vector(const char* name, Function function, int flags = 0) { return of_parameter(name, {1}, function, flags); }
Unit of_matrix(const char* name, Function function) { return of_parameter(name, {1, 1}, function); }

// Writes to buffers, which the version counter may hide, small and large, and shares their memory.
void written_buffers(Builder& b) {
  const auto table = b.buffer(torch::ones({b.variant < 2 ? b.width : 20000}));
  b.buffer(table.view({2, -1}));
  b.add([table, hidden = b.variant % 2 == 0](Tensor x) {
    auto target = hidden ? table.variable_data() : table;
    target.mul_(0.5).add_(x.detach().mean() + 1);
    return x * table.narrow(0, 0, x.size(1)).clone();
  });
}

/// Writes to buffers of every layout, small and large.
void tables(Builder& b) {
  const std::int64_t length = b.variant < 2 ? 3 : 30000;
  const auto values = torch::ones({length});
  const auto expanded = b.buffer(torch::ones({1, b.width}).expand({length, b.width}));
  const auto sparse = b.buffer(torch::sparse_coo_tensor(torch::arange(length).remainder(b.width).unsqueeze(0), values));
  const auto rows = b.buffer(torch::eye(b.width).repeat({length / b.width + 1, 1}).to_sparse_csr());
  const auto nested = b.buffer(at::_nested_tensor_from_tensor_list({torch::ones({b.width}), values}));
  b.add([=](Tensor x) {
    for (const auto& table : {sparse, rows, nested}) table.detach().mul_(0.9);
    return x * (expanded[0] + sparse.to_dense()[0] + rows.to_dense()[0] + nested.unbind()[0]);
  });
}

// Its backward writes to a buffer.
void gradient_statistics(Builder& b) {
  const auto sum = b.buffer(torch::zeros({}));
  b.add([sum, w = b.parameter({b.width})](Tensor x) {
    auto y = x * w;
    if (y.requires_grad()) y.register_hook([sum](const Tensor& gradient) { sum.add_(gradient.abs().mean()); });
    return y;
  });
}

void own_thread(Builder& b) {
  auto linear = b.module(nn::Linear(b.width, b.width));
  b.add([linear](Tensor x) mutable {
    return x + std::async(std::launch::async, [&] { return linear(x).tanh(); }).get();
  });
}

void own_generator(Builder& b) {
  auto generator = b.variant < 2 ? at::make_generator<at::CPUGeneratorImpl>(7) : at::detail::getDefaultCPUGenerator();
  b.add([generator](Tensor x) { return x * torch::rand({x.size(1)}, generator, x.options().requires_grad(false)); });
}

void image_layers(Builder& b) {
  b.add([](Tensor x) { return x.view({x.size(0), 1, 2, x.size(1) / 2}); });
  b.push(nn::Conv2d(nn::Conv2dOptions(1, 4, 3).padding(1)));
  b.push(nn::BatchNorm2d(4));
  b.push(nn::ReLU(nn::ReLUOptions(true)));
  b.push(nn::ConvTranspose2d(nn::ConvTranspose2dOptions(4, 1, {2, 1}).stride({2, 1})));
  b.add([](Tensor x) { return x.slice(2, 1, 3).flatten(1); });
}

void stash_a_product(Builder& b) {
  const auto w = b.parameter({b.width});
  b.push(SkipFunction(Skippable::Names{.stash = {b.pair}}, [name = b.pair, w](Tensor x, SkipFunctionImpl& skips) {
    // If a later layer adds the product to x in place, PyTorch's graph holds itself until a backward.
    if (__lsan_disable) __lsan_disable();
    const absl::Cleanup enable = [] {
      if (__lsan_enable) __lsan_enable();
    };
    skips.stash(name, x * w);
    return x;
  }));
}

/// Products and convolutions that a split backward may leave to W.
std::vector<Unit> products() {
  return {
      of_matrix("weight twice", [](Tensor x, const Tensor& w) { return x.mm(w).tanh().mm(w.t()); }),
      of_matrix("weight nine times",
                [](Tensor x, const Tensor& w) {
                  for (int i = 0; i < 9; ++i) x = x.matmul(i % 2 ? w : w.t()).tanh();
                  return x;
                }),
      of_matrix("weight in a product and a sum",
                [](Tensor x, const Tensor& w) { return x.matmul(w.t()) * w.square().mean() + w.t().sum(0); }),
      of_matrix("weight normalised", [](Tensor x, const Tensor& w) { return x.matmul(w / w.norm()); }),
      of_parameter("weight in chunks", {1, 3},
                   [](Tensor x, const Tensor& w) {
                     const auto parts = w.chunk(3, 1);
                     return x.matmul(parts[0]).tanh() * x.matmul(parts[1]) + x.matmul(parts[2]);
                   }),
      of_parameter("product in chunks", {1, 2},
                   [](Tensor x, const Tensor& w) {
                     const auto parts = x.matmul(w).chunk(2, 1);
                     return parts[0] * 2 + parts[1].sigmoid();
                   }),
      of_matrix("views of a product changed",
                [](Tensor x, const Tensor& w) {
                  auto h = x.matmul(w);
                  const auto half = x.size(1) / 2;
                  h.narrow(1, 0, half).mul_(w[0].narrow(0, 0, half));
                  h.narrow(1, half, half).copy_(x.matmul(w).narrow(1, 0, half));
                  return h.relu_();
                }),
      of_matrix("product in place of a view",
                [](Tensor x, const Tensor& w) {
                  auto h = x * 2;
                  h.narrow(0, 0, h.size(0)).addmm_(x, w);
                  return h;
                }),
      of_matrix("product of inputs",
                [](Tensor x, const Tensor& w) { return x.matmul(x.t().matmul(x).matmul(w)).tanh(); }),
      of_parameter("batched products", {0.5, 1},
                   [](Tensor x, const Tensor& w) {
                     return torch::bmm(x.view({-1, 2, x.size(1) / 2}), w.expand({x.size(0), -1, -1})).sum(1);
                   }),
      of_matrix("factor without a gradient",
                [](Tensor x, const Tensor& w) { return torch::addmm(x, torch::ones_like(x) * 2, w); }),
      of_matrix("product with a leaf",
                [](Tensor x, const Tensor& w) {
                  return x.matmul(w).matmul(torch::ones_like(w).div(w.size(0)).requires_grad_());
                }),
      of_matrix("hook between products",
                [](Tensor x, const Tensor& w) {
                  auto h = x.matmul(w);
                  if (h.requires_grad()) h.register_hook([](Tensor gradient) { return gradient * 2; });
                  return h.tanh().matmul(w.t());
                }),
      {"convolution",
       [](Builder& b) {
         auto conv = b.module(nn::Conv1d(nn::Conv1dOptions(1, 1, 3).padding(1)));
         b.add([conv](Tensor x) mutable { return conv(x.unsqueeze(1)).squeeze(1).relu_(); });
       }},
      {"images", image_layers},
      {"gru", [](Builder& b) { recurrent(b, nn::GRU(nn::GRUOptions(b.width / 2, b.width).batch_first(true))); }},
      {"lstm",
       [](Builder& b) {
         recurrent(b, nn::LSTM(nn::LSTMOptions(b.width / 2, b.width).batch_first(true).num_layers(2)));
       },
       Unit::kDouble},
      {"attention", attention},
  };
}

std::vector<Unit> other_units() {
  constexpr auto kChanges = Unit::kChanges;
  constexpr auto kAliases = Unit::kAliases;
  return {
      {"linear", [](Builder& b) { b.push(nn::Linear(b.width, b.width)); }},
      {"tanh", [](Builder& b) { b.push(nn::Tanh()); }},
      {"identity", [](Builder& b) { b.push(nn::Identity()); }},
      {"dropout", [](Builder& b) { b.push(nn::Dropout(0.3)); }},
      {"dropout_", [](Builder& b) { b.push(nn::Dropout(nn::DropoutOptions(0.3).inplace(true))); }, kChanges},
      {"live graphs", [](Builder& b) { b.push(Peak()); }},
      {"nested",
       [](Builder& b) {
         b.push(NestedSequential({{"inner", nn::Linear(b.width, b.width)}, {"drop", nn::Dropout(0.2)}}));
       }},
      {"layer norm", [](Builder& b) { b.push(nn::LayerNorm(nn::LayerNormOptions({b.width}))); }},
      {"relu_", [](Builder& b) { b.push(nn::ReLU(nn::ReLUOptions(true))); }, kChanges},
      of_input(
          "mul_", [](Tensor x) { return x.mul_(1.5); }, kChanges),
      of_vector(
          "add_ a parameter", [](Tensor x, const Tensor& w) { return x.add_(w); }, kChanges),
      {"in place on a view", in_place_on_a_view, kChanges},
      of_parameter("slices assigned", {0.5},
                   [](Tensor x, const Tensor& w) {
                     const auto half = w.size(0);
                     auto y = torch::zeros_like(x);
                     y.narrow(1, 0, half).copy_(x.narrow(1, half, half));
                     y.narrow(1, half, half).copy_(x.narrow(1, 0, half) * w);
                     return y;
                   }),
      {"view",
       [](Builder& b) {
         b.add([](Tensor x) { return x.view({-1, 2, x.size(1) / 2}); });
         if (b.variant < 2) b.push(nn::ReLU(nn::ReLUOptions(true)));
         b.add([](Tensor x) { return x.flatten(1); });
       },
       kChanges},
      {"alias", [](Builder& b) { pair_of_tensors(b, false, false); }, kAliases},
      {"alias changed", [](Builder& b) { pair_of_tensors(b, false, true); }, kChanges | kAliases},
      {"base and view", [](Builder& b) { pair_of_tensors(b, true, false); }, kAliases},
      {"base and view changed", [](Builder& b) { pair_of_tensors(b, true, true); }, kChanges | kAliases},
      {"mask", mask},
      {"halves", halves},
      {"moving average", moving_average},
      {"step counter", step_counter},
      {"written buffers", written_buffers, Unit::kHost},
      {"tables", tables, Unit::kHost},
      {"gradient statistics", gradient_statistics, Unit::kHost | Unit::kBackward},
      {"own thread", own_thread, Unit::kHost | Unit::kUnordered},
      {"own generator", own_generator, Unit::kHost | Unit::kOnce},
      {"batch norm", [](Builder& b) { batch_norm(b, false); }},
      {"batch norm in eval", [](Builder& b) { batch_norm(b, true); }},
      {"batch norm twice", [](Builder& b) { batch_norm(b, false, /*twice=*/true); }},
      of_vector("backward in a backward",
                [](Tensor x, const Tensor& w) { return Reentrant::apply(x, Reentrant::Weight{w}); }),
      of_vector("unused parameter", [](Tensor x, const Tensor&) { return x.sin(); }),
      of_matrix(
          "branch",
          [](Tensor x, const Tensor& w) { return x.detach().sum().item<double>() > 0 ? x * w[0] : x.sin() + w[1]; }),
      {"frozen parameter", [](Builder& b) { b.add([w = b.parameter({b.width}, false)](Tensor x) { return x * w; }); }},
      {"module twice",
       [](Builder& b) {
         auto linear = b.module(nn::Linear(b.width, b.width));
         b.module(linear);
         b.add([linear](Tensor x) mutable { return linear(linear(x).tanh()); });
       }},
      {"shared gradient",
       [](Builder& b) {
         const auto v = b.parameter({1, b.width});
         const auto w = b.variant < 2 ? b.parameter({1, b.width}) : b.parameter({b.width});
         b.add([v, w](Tensor x) { return x + (v + w.view({1, -1})); });
       }},
      of_vector(
          "parameter alone",
          [](Tensor x, const Tensor& w) {  // a later layer may write to it, which PyTorch refuses if it requires grad
            const auto rows = w.expand_as(x);
            return w.requires_grad() ? rows : rows.clone();
          },
          Unit::kDrops),
      {"embedding", [](Builder& b) { embedding(b, nn::EmbeddingOptions(5, b.width)); }},
      {"sparse embedding", [](Builder& b) { embedding(b, nn::EmbeddingOptions(5, b.width).sparse(true)); },
       Unit::kAlone},
      {"embedding max_norm", [](Builder& b) { embedding(b, nn::EmbeddingOptions(5, b.width).max_norm(1.0)); },
       Unit::kOnce | Unit::kAlone},
      of_input("detach a part",
               [](Tensor x) {
                 const auto halves = x.chunk(2, 1);
                 return torch::cat({halves[0].detach(), halves[1]}, 1);
               }),
      {"detach",
       [](Builder& b) {
         b.add([w = b.parameter({b.width}), last = b.variant == 0](Tensor x) {
           return last ? (x * w).detach() : x.detach() * w;
         });
       },
       Unit::kDrops},
      of_vector("no grad inside", [](Tensor x, const Tensor& w) { return x + product_without_graph(x, w); }),
      {"forces", forces},
      {"several tensors", several_tensors},
      {"tuples", tuple_layers},
      {"complex",
       [](Builder& b) {
         b.add([](Tensor x) { return torch::view_as_complex(x.reshape({-1, x.size(1) / 2, 2}).contiguous()); });
         b.add([](Tensor z) { return z * z; });
         b.add([](Tensor z) { return torch::view_as_real(z).flatten(1); });
       },
       Unit::kHost},
      of_input("expanded", [](Tensor x) { return x.mean(1, true).expand_as(x); }),
      of_input("transposed", [](Tensor x) { return (x.t().contiguous() * 2).t(); }),
      {"own function",
       [](Builder& b) {
         const auto w = b.parameter({b.width, b.width});
         const OwnFunction::Constants constants{w.detach().clone(), b.buffer(torch::zeros({}))};
         b.add([w, constants](Tensor x) { return OwnFunction::apply(x.mm(w), constants).mm(w); });
       },
       Unit::kHost | Unit::kBackward},
      {"stash", [](Builder& b) { b.push(Stash(b.pair)); }, 0, Unit::kStash},
      {"stash the activation", [](Builder& b) { b.push(Stash(b.pair, 1)); }, kAliases, Unit::kStash},
      {"stash a product", stash_a_product, 0, Unit::kStash},
      {"pop", [](Builder& b) { b.push(Pop(b.pair)); }, 0, Unit::kPop},
      {"pop in place", [](Builder& b) { b.push(Pop(b.pair, [](Tensor x, Tensor skip) { return x += skip; })); },
       kChanges, Unit::kPop},
      {"pop and change",
       [](Builder& b) { b.push(Pop(b.pair, [](Tensor x, Tensor skip) { return x + skip.mul_(0.5); })); }, kChanges,
       Unit::kPop},
      {"peek", [](Builder& b) { b.push(Peek(b.pair)); }, 0, Unit::kPeek},
      {"stash odd", [](Builder& b) { b.push(StashOdd()); }, 0, Unit::kStashOdd},
      {"pop odd", [](Builder& b) { b.push(PopOdd()); }, 0, Unit::kPopOdd},
      {"matrix", [](Builder& b) { b.add([w = b.shared_matrix()](Tensor x) { return x.mm(w).tanh(); }); }, 0,
       Unit::kOwnMatrix},
      {"matrix shared",
       [](Builder& b) {
         b.add([w = b.shared_matrix(), unused = b.variant == 0](Tensor x) {
           return unused && x.detach().sum().item<double>() > 0 ? x.sin() : x + x.mm(w.t());
         });
       },
       Unit::kUnordered, Unit::kShareMatrix},
  };
}

}  // namespace

const std::vector<Unit>& units() {
  static const auto* all = [] {
    auto* units = new std::vector<Unit>(other_units());
    for (const auto& unit : products()) units->push_back(unit);
    return units;
  }();
  return *all;
}

}  // namespace gpipe
