// Which tensors need gradients, which tensors a layer must not differentiate by, and sums of gradients.
#include "gpipe/autograd/boundary.h"
#include "tests/gpipe/layers.h"

namespace gpipe {
namespace {

TEST(Gradients, AreNotNeededByAMaskThatIsPassedOn) {
  using Pair = std::tuple<Tensor, Tensor>;
  std::atomic<bool> mask_required_grad = false;
  const auto masked = [&] {
    return function_layer([&](Pair in) {
      const auto& [x, mask] = in;
      if (torch::GradMode::is_enabled() && mask.requires_grad()) mask_required_grad = true;
      return Pair(x * mask * 2, mask);
    });
  };
  for (const auto checkpoint : kModes) {
    GPipe pipe(Sequential(masked(), masked()), {1, 1}, in_chunks(2, checkpoint));
    const auto out = pipe->forward(Value(Pair(torch::randn({4, 6}).requires_grad_(), torch::ones({4, 6})))).tensors();
    EXPECT_TRUE(out[0].requires_grad());
    EXPECT_FALSE(out[1].requires_grad());
    out[0].sum().backward();
    EXPECT_FALSE(mask_required_grad);
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
  EXPECT_THAT([&] { pipe->forward(torch::randn({4, 6})); }, refused("detach tensors that a layer keeps between calls"));
}

Tensor full(double value) { return torch::full({2, 3}, value); }

TEST(GradientSums, ChangeOnlyTheirOwnMemory) {
  const auto shared = full(1);
  struct Case {
    const char* name;
    Tensor first, second, sum;
  };
  for (const auto& [name, first, second, sum] : std::vector<Case>{
           {"of another sum", shared, full(10), full(11)},
           {"a view", shared.view({3, 2}), full(10).view({3, 2}), full(11).view({3, 2})},
           {"expanded", torch::ones({1, 3}).expand({2, 3}), full(1), full(2)},
           {"undefined", Tensor(), Tensor(), Tensor()},
           {"undefined first", Tensor(), full(1), full(1)},
           {"sparse and dense", full(2).to_sparse(), full(3), full(5)},
           {"dense and sparse", full(3), full(2).to_sparse(), full(5)},
       }) {
    GradientSums sums(1);
    sums.add(0, first);
    sums.add(0, second);
    EXPECT_TRUE(same(sums.take()[0], sum)) << name;
    EXPECT_TRUE(same(shared, full(1))) << name;
  }
  GradientSums sums(1);
  auto first = full(1);
  const auto* memory = first.data_ptr();
  sums.add(0, std::move(first));
  sums.add(0, full(2));
  const auto sum = sums.take()[0];
  EXPECT_TRUE(same(sum, full(3)));
  EXPECT_EQ(sum.data_ptr(), memory);
}

}  // namespace
}  // namespace gpipe
