// Tensors that cross a cut and share memory: what would be silently wrong is refused, all else works.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>

#include "gpipe/autograd/overlap.h"
#include "gpipe/gpipe.h"
#include "tests/gpipe/layers.h"

namespace gpipe {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;
using torch::Tensor;
using torch::nn::Linear;
using torch::nn::Sequential;
using Pair = std::tuple<Tensor, Tensor>;

struct SplitImpl : torch::nn::Module {
  explicit SplitImpl(std::function<Pair(Tensor)> f) : f(std::move(f)) {}
  Pair forward(Tensor x) { return f(std::move(x)); }
  std::function<Pair(Tensor)> f;
};
struct MapImpl : torch::nn::Module {
  explicit MapImpl(std::function<Pair(Pair)> f) : f(std::move(f)) {}
  Pair forward(Pair in) { return f(std::move(in)); }
  std::function<Pair(Pair)> f;
};
struct JoinImpl : torch::nn::Module {
  Tensor forward(Pair in) { return std::get<0>(in).exp().sum(1) + std::get<1>(in).sin().sum(1); }
};

Sequential model_of(std::function<Pair(Tensor)> split, std::function<Pair(Pair)> map) {
  Sequential model(Linear(6, 6));
  model->push_back(std::make_shared<SplitImpl>(std::move(split)));
  model->push_back(std::make_shared<MapImpl>(std::move(map)));
  model->push_back(std::make_shared<JoinImpl>());
  return model;
}

Pair change_first(Pair in) {
  std::get<0>(in).mul_(2);
  return in;
}
Pair change_second(Pair in) {
  std::get<1>(in).mul_(2);
  return in;
}

/// The gradient of the first layer's weight, unpartitioned and by a pipeline.
std::pair<Tensor, Tensor> gradients(Sequential model, std::vector<std::int64_t> balance, Checkpoint checkpoint) {
  const auto weight = model->at<torch::nn::LinearImpl>(0).weight;
  const auto x = torch::randn({4, 6});
  const auto expected = torch::autograd::grad({model->forward(x).sum()}, {weight})[0];
  GPipe pipe(model, std::move(balance), GPipeOptions().chunks(2).checkpoint(checkpoint));
  return {expected, torch::autograd::grad({pipe->forward(x).sum()}, {weight})[0]};
}

TEST(SharedMemoryTest, AChangeInPlaceThatAnotherElementWouldMissIsRefused) {
  const std::function<Pair(Tensor)> splits[] = {
      [](Tensor x) { return Pair(x, x); },
      [](Tensor x) { return Pair(x, x.slice(1, 0, 3)); },
      [](Tensor x) { return Pair(x.slice(1, 0, 4), x.slice(1, 3, 6)); },
  };
  for (const auto checkpoint : {Checkpoint::kNever, Checkpoint::kAlways}) {
    for (int i = 0; i < 3; ++i) {
      for (const auto& change : {change_first, change_second}) {
        SCOPED_TRACE("split " + std::to_string(i) + (change == change_first ? ", first" : ", second") +
                     (checkpoint == Checkpoint::kNever ? ", never" : ", always"));
        EXPECT_THAT(
            [&] {
              gradients(model_of(splits[i], change), {2, 2}, checkpoint);
            },
            ThrowsMessage<std::runtime_error>(HasSubstr("a tensor was changed in place by layer '2'")));
        // In one stage autograd sees it all.
        const auto [expected, got] = gradients(model_of(splits[i], change), {3, 1}, checkpoint);
        EXPECT_TRUE(torch::allclose(got, expected, 1e-4, 1e-5));
      }
    }
  }
}

TEST(SharedMemoryTest, PartsThatDoNotOverlapMayBeChanged) {
  const std::function<Pair(Tensor)> splits[] = {
      [](Tensor x) { return Pair(x.slice(1, 0, 3), x.slice(1, 3, 6)); },
      [](Tensor x) { return Pair(x.slice(1, 0, 6, 2), x.slice(1, 1, 6, 2)); },
      [](Tensor x) { return Pair(x.select(1, 2).unsqueeze(1), x.slice(1, 3, 6)); },
  };
  for (const auto checkpoint : {Checkpoint::kNever, Checkpoint::kAlways}) {
    for (const auto& split : splits) {
      const auto [expected, got] = gradients(model_of(split, change_first), {2, 2}, checkpoint);
      EXPECT_TRUE(torch::allclose(got, expected, 1e-4, 1e-5));
    }
  }
}

TEST(SharedMemoryTest, IsSeenThroughStagesThatPassTensorsOn) {
  Sequential longer(Linear(6, 6));
  longer->push_back(std::make_shared<SplitImpl>([](Tensor x) { return Pair(x, x); }));
  longer->push_back(std::make_shared<MapImpl>([](Pair in) { return in; }));
  longer->push_back(std::make_shared<MapImpl>(change_first));
  longer->push_back(std::make_shared<JoinImpl>());
  GPipe pipe(longer, {2, 1, 2});
  EXPECT_THAT(
      [&] {
        pipe->forward(torch::randn({4, 6}));
      },
      ThrowsMessage<std::runtime_error>(HasSubstr("changed in place by layer '3'")));
}

struct StashSameImpl : torch::nn::Module, Skippable {
  StashSameImpl() : Skippable({.stash = {"same"}}) {}
  Tensor forward(Tensor x) {
    stash("same", x);
    return x;
  }
};
struct PopSameImpl : torch::nn::Module, Skippable {
  explicit PopSameImpl(std::function<Tensor(Tensor, Tensor)> f) : Skippable({.pop = {"same"}}), f(std::move(f)) {}
  Tensor forward(Tensor x) { return f(x, pop("same")); }
  std::function<Tensor(Tensor, Tensor)> f;
};

TEST(SharedMemoryTest, ASkipThatIsAlsoTheActivation) {
  const auto run = [](std::function<Tensor(Tensor, Tensor)> f, std::vector<std::int64_t> balance) {
    Sequential model(Linear(6, 6));
    model->push_back(std::make_shared<StashSameImpl>());
    model->push_back(std::make_shared<PopSameImpl>(std::move(f)));
    return gradients(model, std::move(balance), Checkpoint::kNever);
  };
  const auto add = [](Tensor x, Tensor same) { return x.exp() + same; };
  const auto [expected, got] = run(add, {2, 1});
  EXPECT_TRUE(torch::allclose(got, expected, 1e-4, 1e-5));
  const std::function<Tensor(Tensor, Tensor)> changes[] = {
      [](Tensor x, Tensor same) { return x.mul_(2) + same.sin(); },
      [](Tensor x, Tensor same) { return same.mul_(2) + x.sin(); },
  };
  for (const auto& change : changes) {
    EXPECT_THAT(
        [&] {
          run(change, {2, 1});
        },
        ThrowsMessage<std::runtime_error>(HasSubstr("changed in place by layer '2'")));
    const auto [expected_in_one, got_in_one] = run(change, {1, 2});
    EXPECT_TRUE(torch::allclose(got_in_one, expected_in_one, 1e-4, 1e-5));
  }
}

TEST(SharedMemoryTest, AnInputThatIsGivenTwice) {
  struct AddImpl : torch::nn::Module {
    Tensor forward(Pair in) { return std::get<0>(in).mul_(2) + std::get<1>(in); }
  };
  Sequential model;
  model->push_back(std::make_shared<AddImpl>());
  GPipe pipe(model, {1});
  const auto x = torch::ones({4, 6});
  EXPECT_THAT([&] { pipe->forward(Value(std::make_tuple(x, x))); },
              ThrowsMessage<std::runtime_error>(HasSubstr("'0'")));
  pipe->forward(Value(std::make_tuple(x.clone(), x)));
}

TEST(SharedMemoryTest, OutputsHaveMemoryOfTheirOwn) {
  Sequential model;
  model->push_back(std::make_shared<SplitImpl>([](Tensor x) { return Pair(x, x.slice(1, 0, 3)); }));
  GPipe pipe(model, {1});
  const auto x = torch::ones({4, 6});
  const auto out = pipe->forward(Value(x)).tensors();
  EXPECT_FALSE(out[0].is_alias_of(x) || out[1].is_alias_of(x) || out[0].is_alias_of(out[1]));
}

TEST(OverlapTest, AgreesWithCountingElements) {
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
      bool shared = false;
      if (a.is_alias_of(b)) {
        const auto elements = a.flatten();
        const auto others = b.flatten();
        shared = torch::isin(elements, others).any().item<bool>();  // each element of the base is its own index
      }
      EXPECT_EQ(overlap(a, b), shared) << a.sizes() << a.strides() << a.storage_offset() << b.sizes() << b.strides()
                                       << b.storage_offset();
    }
  }
}

}  // namespace
}  // namespace gpipe
