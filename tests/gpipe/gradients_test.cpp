// Which tensors need gradients, which tensors a layer must not differentiate by, and sums of gradients.
#include "gpipe/autograd/boundary.h"
#include "tests/gpipe/layers.h"

namespace gpipe {
namespace {

TEST(Gradients, AreNotNeededByAMaskThatIsPassedOn) {
  struct MaskedImpl : torch::nn::Module {
    std::tuple<Tensor, Tensor> forward(std::tuple<Tensor, Tensor> in) {
      if (torch::GradMode::is_enabled()) mask_required_grad = mask_required_grad || std::get<1>(in).requires_grad();
      return {linear(std::get<0>(in)) * std::get<1>(in), std::get<1>(in)};
    }
    Linear linear = register_module("linear", Linear(6, 6));
    std::atomic<bool> mask_required_grad = false;
  };
  for (const auto checkpoint : kModes) {
    auto first = std::make_shared<MaskedImpl>();
    auto second = std::make_shared<MaskedImpl>();
    GPipe pipe(Sequential(first, second), {1, 1}, in_chunks(2, checkpoint));
    const auto out = pipe->forward(Value(std::make_tuple(torch::randn({4, 6}), torch::ones({4, 6}))));
    EXPECT_TRUE(out.tensors()[0].requires_grad());
    EXPECT_FALSE(out.tensors()[1].requires_grad());
    out.tensors()[0].sum().backward();
    EXPECT_FALSE(first->mask_required_grad || second->mask_required_grad);
  }
}

TEST(Gradients, RefuseALeafThatIsNotAParameterAndAGraphFromOutside) {
  const auto leaf = torch::ones({6}).requires_grad_();
  const auto twice = leaf * 2;
  for (const bool input_gradient : {false, true}) {
    const auto x = torch::ones({2, 6}).requires_grad_(input_gradient);
    for (const auto& [factor, what] : {std::pair(leaf, "neither a parameter nor an input"), std::pair(twice, "")}) {
      GPipe pipe(Sequential(Functional([factor = factor](Tensor in) { return in * factor; })), {1}, in_chunks(2));
      EXPECT_THAT([&] { pipe->forward(x); }, refused(what));
    }
  }
  twice.sum().backward();
  EXPECT_TRUE(same(leaf.grad(), torch::full({6}, 2.0))) << "the graph is whole";
}

TEST(Gradients, RefuseATensorKeptFromAnotherMicroBatch) {
  Tensor kept = torch::zeros({1, 6});
  Sequential model(Linear(6, 6), Functional([&kept](Tensor x) {
                     const auto y = x + kept;
                     kept = x.slice(0, 0, 1);
                     return y;
                   }));
  GPipe pipe(model, {1, 1}, in_chunks(2, Checkpoint::kNever));
  const auto x = torch::randn({4, 6});
  EXPECT_THAT([&] { pipe->forward(x); }, refused("detach tensors that a layer keeps between calls"));
}

// A sum is changed in place only if no other tensor shares its memory.

Tensor full(double value) { return torch::full({2, 3}, value); }

TEST(GradientSums, StayApartIfTheyBeganWithOneTensor) {
  for (const bool viewed : {false, true}) {
    GradientSums sums(2);
    const auto shared = full(1);
    sums.add(0, shared);
    sums.add(1, viewed ? shared.view({3, 2}) : shared);
    sums.add(0, full(10));
    sums.add(1, viewed ? full(100).view({3, 2}) : full(100));
    EXPECT_TRUE(same(shared, full(1))) << "the caller's gradient must not change";
    const auto taken = sums.take();
    EXPECT_TRUE(same(taken[0], full(11)));
    EXPECT_TRUE(same(taken[1].view({2, 3}), full(101)));
  }
}

TEST(GradientSums, AreNotAddedInPlaceToAnExpandedGradient) {
  GradientSums sums(1);
  sums.add(0, torch::ones({1, 3}).expand({2, 3}));
  sums.add(0, full(1));
  EXPECT_TRUE(same(sums.take()[0], full(2)));
}

TEST(GradientSums, ReuseTheirOwnMemory) {
  GradientSums sums(1);
  auto first = full(1);
  const auto* memory = first.data_ptr();
  sums.add(0, std::move(first));
  sums.add(0, full(2));
  const auto sum = sums.take()[0];
  EXPECT_TRUE(same(sum, full(3)));
  EXPECT_EQ(sum.data_ptr(), memory);
}

TEST(GradientSums, TakeUndefinedSparseAndDenseGradients) {
  GradientSums sums(3);
  sums.add(0, Tensor());
  sums.add(1, full(2).to_sparse());
  sums.add(1, full(3));
  sums.add(2, full(3));
  sums.add(2, full(2).to_sparse());
  const auto taken = sums.take();
  EXPECT_FALSE(taken[0].defined());
  EXPECT_TRUE(same(taken[1], full(5)));
  EXPECT_TRUE(same(taken[2], full(5)));
}

}  // namespace
}  // namespace gpipe
