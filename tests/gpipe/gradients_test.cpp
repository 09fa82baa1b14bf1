// Which tensors a layer must not differentiate by, and sums of gradients. In-place changes of inputs, activations and
// parameters: one that would be lost, because tensors that cross a cut share memory, is refused.
#include "gpipe/autograd/boundary.h"
#include "gpipe/tensors/parcel.h"
#include "tests/gpipe/layers.h"

namespace gpipe {
namespace {

using Pair = std::tuple<Tensor, Tensor>;

TEST(Gradients, RefuseALeafThatIsNotAParameterAndGraphsFromOutside) {
  const auto leaf = torch::ones({6}).requires_grad_();
  const auto twice = leaf * 2;
  Tensor kept = torch::zeros({1, 6});
  const std::pair<std::function<Tensor(Tensor)>, std::string> cases[] = {
      {[&](const Tensor& x) { return x * leaf; }, "neither a parameter nor an input"},
      {[&](const Tensor& x) { return x * twice; }, ""},
      {[&](const Tensor& x) { return x + std::exchange(kept, x.slice(0, 0, 1)); },
       "detach tensors that a layer keeps between calls"},
      {[&](const Tensor& x) {
         Tensor of_thread;
         std::thread([&] { of_thread = twice * 2; }).join();
         return x * of_thread;
       },
       "was built outside"}};
  for (const auto& [function, what] : cases) {
    for (const bool input_gradient : {false, true}) {
      GPipe pipe(Sequential(Linear(6, 6), Functional(function)), {1, 1}, in_chunks(2, Checkpoint::kNever));
      const auto x = torch::ones({4, 6}).requires_grad_(input_gradient);
      EXPECT_THAT([&] { pipe->forward(x); }, refused(what));
      kept = torch::zeros({1, 6});
    }
  }
  twice.sum().backward();
  EXPECT_TRUE(same(leaf.grad(), torch::full({6}, 2.0))) << "the graph is whole";
}

TEST(Gradients, RefuseAParameterThatALayerMakes) {
  struct MakerImpl : torch::nn::Module {
    explicit MakerImpl(bool is_frozen) : is_frozen(is_frozen) {}
    Tensor forward(const Tensor& x) {
      if (!scale.defined()) scale = register_parameter("scale", torch::ones({6}), /*requires_grad=*/!is_frozen);
      return x * scale;
    }
    const bool is_frozen;
    Tensor scale;
  };
  const auto call = [](bool is_frozen, Checkpoint checkpoint) {
    GPipe pipe(Sequential(Linear(6, 6), std::make_shared<MakerImpl>(is_frozen)), {2}, in_chunks(2, checkpoint));
    pipe->forward(torch::ones({2, 6}));
  };
  for (const auto checkpoint : kModes) {
    EXPECT_THAT([&] { call(false, checkpoint); }, refused("layer '1' made a parameter in a forward"));
  }
  EXPECT_THAT([&] { call(true, Checkpoint::kAlways); },
              throws<std::runtime_error>("made a parameter in a forward, so the forward cannot be recomputed"));
  call(true, Checkpoint::kNever);
}

TEST(GradientSums, TakeAnyLayoutAndReuseTheirMemory) {
  const auto full = [](double value) { return torch::full({2, 3}, value); };
  const auto sum_of = [](Tensor first, Tensor second) {
    GradientSums sums(1);
    sums.add(0, std::move(first));
    sums.add(0, std::move(second));
    return sums.take()[0];
  };
  EXPECT_TRUE(same(sum_of(torch::full({1, 3}, 2.0).expand({2, 3}), full(3)), full(5)));
  EXPECT_TRUE(same(sum_of(full(2).to_sparse(), full(3)), full(5)));
  EXPECT_TRUE(same(sum_of(full(3), full(2).to_sparse()), full(5)));
  auto first = full(1);
  const auto* memory = first.data_ptr();
  EXPECT_EQ(sum_of(std::move(first), full(2)).data_ptr(), memory);
}

// A graph of the caller that has saved the input must refuse to use it.
TEST(InPlace, AdvancesTheVersionOfTheCallersTensors) {
  const auto relu = torch::nn::ReLU(torch::nn::ReLUOptions(true));
  const auto weight = torch::rand({6}).requires_grad_();
  for (const auto checkpoint : kModes) {
    for (const int chunks : {1, 3}) {
      GPipe pipe(Sequential(relu, Linear(6, 6)), {1, 1}, in_chunks(chunks, checkpoint));
      const auto x = torch::randn({6, 6});
      const auto of_caller = (weight * x).sum();
      pipe->forward(x).sum().backward();
      EXPECT_THAT([&] { of_caller.backward(); }, throws<c10::Error>("modified by an inplace operation"));
      const auto version = x._version();
      pipe->step(x, x.clone(), kMse);
      EXPECT_GT(x._version(), version);
    }
  }
  const auto x = torch::randn({6, 6});
  GPipe(Sequential(Linear(6, 6)), {1})->forward(x);
  EXPECT_EQ(x._version(), 0u);
}

TEST(InPlace, ChangesOfInputsAndParametersBeforeTheBackwardAreErrors) {
  for (const auto checkpoint : kModes) {
    auto linear = Linear(6, 6);
    GPipe pipe(Sequential(linear, torch::nn::Tanh(), Linear(6, 6)), {2, 1}, in_chunks(2, checkpoint));
    auto x = torch::randn({4, 6});
    auto loss = pipe->forward(x).sum();
    x.mul_(2);
    EXPECT_THAT([&] { loss.backward(); }, throws<std::runtime_error>("an input was changed in place"));
    loss = pipe->forward(x.requires_grad_()).sum();
    linear->weight.detach().mul_(2);
    EXPECT_THAT([&] { loss.backward(); },
                throws<std::exception>(checkpoint == Checkpoint::kNever ? "modified by an inplace operation"
                                                                        : "a parameter was changed in place"));
    EXPECT_FALSE(linear->weight.grad().defined());
  }
}

TEST(InPlace, AStageThatBeginsToChangeItsInputFailsOnceAndThenWorks) {
  bool in_place = false;
  auto model = Sequential(Linear(6, 6), Functional([&in_place](Tensor x) { return in_place ? x.mul_(2) : x * 2; }),
                          Linear(6, 6));
  GPipe pipe(model, {1, 2}, in_chunks(2, Checkpoint::kAlways));
  const auto x = torch::randn({4, 6}).requires_grad_();
  const auto gradient = [&] { return gradient_of(pipe->forward(x).sum(), x); };
  const auto expected = gradient();
  in_place = true;
  EXPECT_THAT(gradient, throws<std::runtime_error>("in place by one of its layers"));
  EXPECT_TRUE(same(gradient(), expected));
}

// The generated cases change tensors that overlap, and tensors that do not.
TEST(AliasCheck, OfInputsAndOutputs) {
  GPipe pipe(Sequential(function_layer([](Pair in) { return std::get<0>(in).mul_(2) + std::get<1>(in); })), {1});
  const auto x = torch::ones({4, 6});
  EXPECT_THAT([&] { pipe->forward(Value(Pair(x, x))); }, throws<std::runtime_error>("'0'"));
  x.fill_(1);
  EXPECT_TRUE(same(pipe->forward(Value(Pair(x.clone(), x))).tensor(), torch::full({4, 6}, 3.0)));
  GPipe views(Sequential(function_layer([](Tensor x) { return Pair(x, x.slice(1, 0, 3)); })), {1});
  const auto out = views->forward(Value(x)).tensors();
  EXPECT_FALSE(out[0].is_alias_of(x) || out[1].is_alias_of(x) || out[0].is_alias_of(out[1]));
}

TEST(Overlap, AgreesWithCountingElements) {
  const auto base = torch::arange(48);
  std::vector<Tensor> views = {base, base.slice(0, 0, 24), base.slice(0, 24, 48), torch::arange(48)};
  for (const auto& shape : {std::vector<std::int64_t>{6, 8}, {4, 3, 4}}) {
    const auto whole = base.view(shape);
    for (std::int64_t d = 0; d < whole.dim(); ++d) {
      for (std::int64_t start = 0; start < 3; ++start) {
        views.push_back(whole.slice(d, start, start + 2));
        views.push_back(whole.slice(d, start, whole.size(d), 2));
        views.push_back(whole.select(d, start).t());
      }
    }
  }
  views.push_back(base.slice(0, 3, 4).expand({5}));
  views.push_back(base.as_strided({4, 4}, {1, 1}, 7));
  for (const auto& a : views) {
    for (const auto& b : views) {
      // The elements of the base are all different.
      const bool shared = a.is_alias_of(b) && torch::isin(a.flatten(), b.flatten()).any().item<bool>();
      const bool have_gaps = !a.is_non_overlapping_and_dense() || !b.is_non_overlapping_and_dense();
      EXPECT_EQ(overlap(a, b), have_gaps ? a.is_alias_of(b) : shared)
          << a.sizes() << a.strides() << a.storage_offset() << b.sizes() << b.strides() << b.storage_offset();
    }
  }
}

}  // namespace
}  // namespace gpipe
