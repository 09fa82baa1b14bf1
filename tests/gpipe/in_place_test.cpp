// In-place changes of inputs, activations and parameters. A change is refused if it would be lost, because tensors that
// cross a cut share memory.
#include "gpipe/tensors/parcel.h"
#include "tests/gpipe/layers.h"

namespace gpipe {
namespace {

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
  GPipe pipe(Sequential(Linear(6, 6)), {1});
  const auto x = torch::randn({6, 6});
  pipe->forward(x);
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

using Pair = std::tuple<Tensor, Tensor>;

/// A linear layer, one that makes a pair of tensors, one that maps the pair, and one that joins it.
Sequential model_of(std::function<Pair(Tensor)> split, std::function<Pair(Pair)> map) {
  return Sequential(
      Linear(6, 6), function_layer(std::move(split)), function_layer(std::move(map)),
      function_layer([](Pair in) { return std::get<0>(in).exp().sum(1) + std::get<1>(in).sin().sum(1); }));
}

template <int kIndex>
Pair change(Pair in) {
  std::get<kIndex>(in).mul_(2);
  return in;
}

/// Expects the gradient of the first layer's weight by the unpartitioned model and by a pipeline to be equal.
void expect_same_gradients(Sequential model, Balance balance, Checkpoint checkpoint) {
  const auto weight = model->at<torch::nn::LinearImpl>(0).weight;
  const auto x = torch::randn({4, 6});
  const auto expected = gradient_of(model->forward(x).sum(), weight);
  GPipe pipe(model, std::move(balance), in_chunks(2, checkpoint));
  const auto got = gradient_of(pipe->forward(x).sum(), weight);
  EXPECT_TRUE(torch::allclose(got, expected, 1e-4, 1e-5));
}

TEST(AliasCheck, MayNotBeChangedWhereTensorsOverlap) {
  const std::pair<const char*, std::function<Pair(Tensor)>> splits[] = {
      {"the same", [](Tensor x) { return Pair(x, x); }},
      {"overlapping", [](Tensor x) { return Pair(x.slice(1, 0, 4), x.slice(1, 3, 6)); }},
  };
  for (const auto checkpoint : {Checkpoint::kNever, Checkpoint::kAlways}) {
    for (const auto& [name, split] : splits) {
      for (const bool second : {false, true}) {
        SCOPED_TRACE(std::string(name) + (second ? ", second, " : ", first, ") + to_string(checkpoint));
        const auto cut_at = [&, &split = split](std::int64_t layer) {
          expect_same_gradients(model_of(split, second ? change<1> : change<0>), {layer, 4 - layer}, checkpoint);
        };
        EXPECT_THAT([&] { cut_at(2); }, throws<std::runtime_error>("a tensor was changed in place by layer '2'"));
        cut_at(3);  // autograd sees a change inside a stage
      }
    }
  }
}

TEST(AliasCheck, MayBeChangedWhereTensorsDoNotOverlap) {
  const auto split = [](Tensor x) { return Pair(x.slice(1, 0, 6, 2), x.slice(1, 1, 6, 2)); };
  for (const auto checkpoint : {Checkpoint::kNever, Checkpoint::kAlways}) {
    expect_same_gradients(model_of(split, change<0>), {2, 2}, checkpoint);
  }
}

TEST(AliasCheck, OfASkipAndTheActivationMayNotBeChanged) {
  const auto run = [](PopImpl::Join join, const Balance& balance) {
    expect_same_gradients(Sequential(Linear(6, 6), Stash("same", 1), Pop("same", join)), balance, Checkpoint::kNever);
  };
  run([](Tensor x, Tensor same) { return x.exp() + same; }, {2, 1});
  const PopImpl::Join changes[] = {
      [](Tensor x, Tensor same) { return x.mul_(2) + same.sin(); },
      [](Tensor x, Tensor same) { return same.mul_(2) + x.sin(); },
  };
  for (const auto& change : changes) {
    EXPECT_THAT([&] { run(change, {2, 1}); }, throws<std::runtime_error>("changed in place by layer '2'"));
    run(change, {1, 2});
  }
}

TEST(AliasCheck, OfAnInputGivenTwiceMayNotBeChanged) {
  GPipe pipe(Sequential(function_layer([](Pair in) { return std::get<0>(in).mul_(2) + std::get<1>(in); })), {1});
  const auto x = torch::ones({4, 6});
  EXPECT_THAT([&] { pipe->forward(Value(Pair(x, x))); }, throws<std::runtime_error>("'0'"));
  x.fill_(1);
  EXPECT_TRUE(same(pipe->forward(Value(Pair(x.clone(), x))).tensor(), torch::full({4, 6}, 3.0)));
}

TEST(AliasCheck, OutputsShareNoneWithEachOtherOrWithAnInput) {
  GPipe pipe(Sequential(function_layer([](Tensor x) { return Pair(x, x.slice(1, 0, 3)); })), {1});
  const auto x = torch::ones({4, 6});
  const auto out = pipe->forward(Value(x)).tensors();
  EXPECT_FALSE(out[0].is_alias_of(x));
  EXPECT_FALSE(out[1].is_alias_of(x));
  EXPECT_FALSE(out[0].is_alias_of(out[1]));
}

TEST(Overlap, AgreesWithCountingElements) {
  const auto base = torch::arange(48);
  std::vector<Tensor> views = {base, base.slice(0, 0, 24), base.slice(0, 24, 48), torch::arange(48),
                               base.slice(0, 5, 5)};
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
      EXPECT_EQ(overlap(a, b), shared) << a.sizes() << a.strides() << a.storage_offset() << b.sizes() << b.strides()
                                       << b.storage_offset();
    }
  }
}

}  // namespace
}  // namespace gpipe
