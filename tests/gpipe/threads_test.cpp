// Threads: callers, workers, intra-op threads, and pipelines inside pipelines.
#include <ATen/Parallel.h>

#include "tests/gpipe/layers.h"

namespace gpipe {
namespace {

TEST(Threads, TakeTurnsInBackwardsOfOneRetainedGraphAlsoAfterThePipeline) {
  std::optional<GPipe> pipe(std::in_place, Sequential(Linear(6, 6), torch::nn::Dropout(0.5), Linear(6, 6)),
                            Balance{1, 2}, in_chunks(3, Checkpoint::kAlways));
  const auto x = torch::randn({6, 6}).requires_grad_();
  const auto loss = (*pipe)->forward(x).pow(2).sum();
  const auto expected = gradient_of(loss, x, /*retain_graph=*/true);
  pipe.reset();
  std::vector<Tensor> got(8);
  std::vector<std::thread> threads;
  for (auto& gradient : got) {
    threads.emplace_back([&] { gradient = gradient_of(loss, x, /*retain_graph=*/true); });
  }
  for (auto& thread : threads) thread.join();
  for (const auto& gradient : got) EXPECT_TRUE(same(gradient, expected));
}

// All sums are exact, so that their order does not matter.
TEST(Threads, StepOnePipelineWhileAnotherRunsABackwardOfItsModel) {
  constexpr int kTimes = 30;
  Sequential model(Linear(4, 4), Linear(4, 4), Linear(4, 4));
  model->to(torch::kDouble);
  torch::NoGradGuard no_grad;
  for (const auto& parameter : model->parameters()) parameter.copy_(torch::randint(-2, 3, parameter.sizes()));
  const auto x = torch::randint(-2, 3, {6, 4}, torch::kDouble);
  torch::AutoGradMode grad_mode(true);
  model->forward(x).sum().backward();
  auto expected = take_gradients(*model);
  for (auto& gradient : expected) gradient *= 3 * kTimes;
  GPipe pipe(model, {1, 1, 1}, in_chunks(3).schedule("1f1b"));
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([&, steps = i < 2] {
      for (int k = 0; k < kTimes; ++k) {
        if (steps) {
          pipe->step(x, x, kSumLoss, kOfSums);
        } else {
          model->forward(x).sum().backward();
        }
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_TRUE(same(take_gradients(*model), expected));
}

TEST(Threads, MayCallThePipelineInAHookOfItsStep) {
  Sequential model(Linear(4, 4), Linear(4, 4));
  GPipe pipe(model, {1, 1}, in_chunks(2));
  const auto x = torch::rand({4, 4});
  int calls = 0;
  model->parameters().front().register_hook([&](const Tensor&) {
    const torch::NoGradGuard no_grad;
    pipe->forward(x);
    ++calls;
  });
  pipe->step(x, x, tensor_loss(torch::nn::MSELoss()));
  EXPECT_EQ(calls, 1);
}

TEST(Threads, BeginAndEndWithThePipeline) {
  { GPipe warm_up(Sequential(Linear(6, 6), torch::nn::Tanh()), {1, 1}); }
  const auto threads = thread_count();
  const int intraop = torch::get_num_threads();
  {
    GPipe pipe(mlp(), {2, 1, 1}, GPipeOptions().intraop_threads(1));
    EXPECT_EQ(thread_count(), threads + 3);
    pipe->forward(torch::randn({4, 6})).sum().backward();
    EXPECT_EQ(torch::get_num_threads(), intraop) << "the caller's setting must not change";
    int elsewhere = 0;
    std::thread([&] { elsewhere = torch::get_num_threads(); }).join();
    EXPECT_EQ(elsewhere, intraop) << "the setting of new threads must not change";
  }
  EXPECT_EQ(thread_count(), threads);
}

TEST(Threads, UseTheGivenIntraopThreadsOrAnEqualShare) {
  const absl::Cleanup put_back = [before = torch::get_num_threads()] { torch::set_num_threads(before); };
  const auto seen = [](int of_caller, int given) {
    torch::set_num_threads(of_caller);
    std::set<int> seen;
    const Functional look([&](Tensor x) {
      at::parallel_for(0, 4, 1, [](std::int64_t, std::int64_t) {});
      seen.insert(torch::get_num_threads());
      return x * 2;
    });
    GPipe pipe(Sequential(Linear(6, 6), look), {1, 1}, in_chunks(2, Checkpoint::kAlways).intraop_threads(given));
    pipe->forward(torch::randn({4, 6})).sum().backward();
    return seen;
  };
  EXPECT_THAT(seen(3, 2), ElementsAre(2));
  EXPECT_THAT(seen(3, 0), ElementsAre(1)) << "half of three";
  EXPECT_THAT(seen(1, 0), ElementsAre(1)) << "at least one";
}

TEST(Threads, OfAPipelineMayNotCallIt) {
  GPipeImpl* self = nullptr;
  GPipe pipe(Sequential(Functional([&self](Tensor x) { return self->forward(std::move(x)); })), {1});
  self = pipe.ptr().get();
  EXPECT_THROW(pipe->forward(torch::ones({1, 2})), std::logic_error);
}

TEST(Threads, OfAPipelineMayCallAnother) {
  for (const auto checkpoint : kModes) {
    GPipe inner(Sequential(Linear(6, 6), torch::nn::Dropout(0.5), Linear(6, 6)), {1, 1, 1}, in_chunks(2, checkpoint));
    GPipe refusing(Sequential(Functional([inner](Tensor x) mutable { return inner->forward(x); })), {1}, in_chunks(2));
    EXPECT_THROW(refusing->forward(torch::randn({4, 6})), std::invalid_argument)
        << "the inner pipeline's parameters belong to no layer";

    Sequential model(Linear(6, 6), std::make_shared<Outer<GPipe>>(inner));
    GPipe outer(model, {1, 1}, in_chunks(2, checkpoint));
    outer->trace(std::make_shared<Timeline>());  // the inner workers' bytes must not be counted for the outer's two
    const auto x = torch::randn({8, 6}).requires_grad_();
    const auto gradients = [&] {
      torch::manual_seed(8);
      outer->forward(x).pow(2).sum().backward();
      return take_gradients(*model);
    };
    const auto expected = gradients();
    for (const auto& gradient : expected) EXPECT_TRUE(gradient.defined());
    EXPECT_TRUE(same(gradients(), expected));
  }
}

}  // namespace
}  // namespace gpipe
