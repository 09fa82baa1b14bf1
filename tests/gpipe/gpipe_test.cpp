#include "gpipe/gpipe.h"

#include <ATen/Parallel.h>
#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <atomic>
#include <filesystem>
#include <iterator>
#include <mutex>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <thread>

#include "gpipe/micro_batch.h"
#include "tests/gpipe/layers.h"
#include "tests/gpipe/reference.h"

namespace gpipe {
namespace {

using torch::Tensor;
using torch::nn::Linear;
using torch::nn::Sequential;

bool same(const Tensor& a, const Tensor& b) {
  return a.defined() == b.defined() && (!a.defined() || torch::equal(a, b));
}

Sequential mlp(int layers = 4, bool dropout = false) {
  Sequential model;
  for (int i = 0; i < layers; ++i) {
    model->push_back(Linear(6, 6));
    if (dropout) model->push_back(torch::nn::Dropout(0.4));
    model->push_back(torch::nn::Tanh());
  }
  return model;
}

TEST(GPipeTest, TrainsTheFunctionOfTheBareModelInFloat64) {
  torch::manual_seed(1);
  auto model = mlp();
  model->to(torch::kFloat64);
  const auto x = torch::randn({7, 6}, torch::kFloat64).requires_grad_();
  const auto expected = model->forward(x);
  expected.pow(2).sum().backward();
  const auto x_gradient = x.grad().clone();
  std::vector<Tensor> gradients;
  for (const auto& parameter : model->parameters()) gradients.push_back(parameter.grad().clone());
  for (const auto checkpoint : {Checkpoint::kNever, Checkpoint::kExceptLast, Checkpoint::kAlways}) {
    for (const int chunks : {1, 2, 3, 7, 20}) {
      model->zero_grad();
      x.mutable_grad() = Tensor();
      GPipe pipe(model, {3, 1, 4}, GPipeOptions().chunks(chunks).checkpoint(checkpoint));
      const auto y = pipe->forward(x);
      EXPECT_TRUE(torch::allclose(y, expected, 1e-12, 1e-14));
      y.pow(2).sum().backward();
      EXPECT_TRUE(torch::allclose(x.grad(), x_gradient, 1e-11, 1e-13));
      for (std::size_t i = 0; i < gradients.size(); ++i) {
        EXPECT_TRUE(torch::allclose(model->parameters()[i].grad(), gradients[i], 1e-11, 1e-13));
      }
    }
  }
}

// The grid of invariant 1.
struct Case {
  std::vector<std::int64_t> balance;
  std::int64_t batch;
  std::int64_t chunks;
  Checkpoint checkpoint;
};

std::vector<Case> grid(const std::vector<std::vector<std::int64_t>>& balances) {
  std::vector<Case> cases;
  for (const auto& balance : balances) {
    for (const auto& [batch, chunks] : {std::pair{6, 1}, {6, 3}, {7, 3}, {2, 4}, {1, 2}, {9, 8}}) {
      for (const auto checkpoint : {Checkpoint::kNever, Checkpoint::kExceptLast, Checkpoint::kAlways}) {
        cases.push_back({balance, batch, chunks, checkpoint});
      }
    }
  }
  return cases;
}

void expect_reference(const Sequential& model, const Case& c, std::vector<Tensor> inputs, Value::Form form) {
  SCOPED_TRACE(::testing::Message() << "balance " << c.balance.size() << " stages from " << c.balance.front()
                                    << ", batch " << c.batch << ", chunks " << c.chunks << ", checkpoint "
                                    << static_cast<int>(c.checkpoint));
  GPipe pipe(model, c.balance, GPipeOptions().chunks(c.chunks).checkpoint(c.checkpoint).intraop_threads(1));
  pipe->train();
  const auto sizes = micro_batch_sizes(c.batch, c.chunks, 0);
  torch::manual_seed(5);
  const auto output = pipe->forward(Value(form, inputs));
  std::vector<Tensor> gradients;
  std::vector<Tensor> differentiable;
  std::vector<Tensor> output_gradients;
  for (const auto& tensor : output.tensors()) {
    gradients.push_back(tensor.requires_grad() ? torch::randn_like(tensor) : Tensor());
    if (!tensor.requires_grad()) continue;
    differentiable.push_back(tensor);
    output_gradients.push_back(gradients.back());
  }
  std::vector<Tensor> wanted;
  for (const auto& tensor : inputs) {
    if (tensor.requires_grad()) wanted.push_back(tensor);
  }
  const auto parameters = model->parameters();
  wanted.insert(wanted.end(), parameters.begin(), parameters.end());
  const auto got = torch::autograd::grad(differentiable, wanted, output_gradients, false, false, true);

  torch::manual_seed(5);
  const int threads = torch::get_num_threads();
  torch::set_num_threads(1);
  const auto expected = reference(model, c.balance, Value(form, inputs), sizes, gradients);
  torch::set_num_threads(threads);
  ASSERT_EQ(output.tensors().size(), expected.outputs.size());
  for (std::size_t k = 0; k < expected.outputs.size(); ++k) {
    EXPECT_TRUE(same(output.tensors()[k].detach(), expected.outputs[k])) << "output " << k;
  }
  std::size_t next = 0;
  for (std::size_t k = 0; k < inputs.size(); ++k) {
    if (inputs[k].requires_grad()) {
      EXPECT_TRUE(same(got[next++], expected.input_gradients[k])) << "input " << k;
    }
  }
  for (std::size_t p = 0; p < parameters.size(); ++p) {
    EXPECT_TRUE(same(got[next++], expected.parameter_gradients[p])) << "parameter " << p;
  }
}

TEST(GPipeTest, EqualsTheReferenceBitByBitWithDropout) {
  torch::manual_seed(2);
  auto model = mlp(3, /*dropout=*/true);
  for (const auto& c : grid({{9}, {4, 5}, {1, 1, 7}, {2, 3, 2, 2}})) {
    expect_reference(model, c, {torch::randn({c.batch, 6}).requires_grad_()}, Value::Form::kTensor);
  }
}

TEST(GPipeTest, EqualsTheReferenceBitByBitWithSkips) {
  torch::manual_seed(3);
  auto model = skip_model();
  for (const auto& c : grid({{10}, {5, 5}, {1, 2, 7}, {3, 3, 2, 2}, {1, 1, 1, 1, 1, 1, 1, 1, 1, 1}})) {
    expect_reference(model, c, {torch::randn({c.batch, 6}).requires_grad_()}, Value::Form::kTensor);
  }
}

TEST(GPipeTest, EqualsTheReferenceBitByBitWithSeveralTensorsAndInPlaceLayers) {
  torch::manual_seed(4);
  auto model = tuple_model();
  for (const auto& c : grid({{6}, {1, 5}, {2, 4}, {3, 3}, {1, 1, 1, 1, 1, 1}})) {
    const auto ids = torch::randint(0, 5, {c.batch}, torch::kLong);
    expect_reference(model, c, {torch::randn({c.batch, 6}).requires_grad_(), ids}, Value::Form::kTuple);
  }
}

TEST(GPipeTest, RepeatsItselfUnderOneSeed) {
  auto model = mlp(3, true);
  GPipe pipe(model, {3, 3, 3}, GPipeOptions().chunks(4));
  const auto x = torch::randn({8, 6});
  torch::manual_seed(11);
  const auto first = pipe->forward(x);
  const auto next = pipe->forward(x);
  torch::manual_seed(11);
  EXPECT_TRUE(same(pipe->forward(x), first));
  EXPECT_TRUE(same(pipe->forward(x), next));
  EXPECT_FALSE(same(first, next));
}

TEST(GPipeTest, ParametersAreSeenOnceByHooksAndGrad) {
  auto model = mlp(2);
  GPipe pipe(model, {2, 2}, GPipeOptions().chunks(4));
  auto weight = model->parameters()[0];
  int calls = 0;
  weight.register_hook([&](const Tensor& gradient) {
    ++calls;
    return gradient * 2;
  });
  const auto x = torch::randn({8, 6});
  pipe->forward(x).sum().backward();
  EXPECT_EQ(calls, 1);
  const auto hooked = weight.grad().clone();
  const auto plain = torch::autograd::grad({pipe->forward(x).sum()}, {weight});
  EXPECT_EQ(calls, 2);
  EXPECT_TRUE(torch::allclose(plain[0], hooked));
  EXPECT_TRUE(same(weight.grad(), hooked)) << "grad() must not write .grad";
}

TEST(GPipeTest, FrozenParametersAndInputsGetNoGradient) {
  auto model = mlp(2);
  model->parameters()[0].requires_grad_(false);
  GPipe pipe(model, {2, 2}, GPipeOptions().chunks(2).checkpoint(Checkpoint::kAlways));
  const auto x = torch::randn({4, 6});
  pipe->forward(x).sum().backward();
  EXPECT_FALSE(model->parameters()[0].grad().defined());
  EXPECT_TRUE(model->parameters()[1].grad().defined());
  EXPECT_FALSE(x.grad().defined());
  for (auto& parameter : model->parameters()) parameter.requires_grad_(false);
  EXPECT_FALSE(pipe->forward(x).requires_grad());
}

TEST(GPipeTest, NoGradAndEvalKeepNothing) {
  auto model = mlp(2, true);
  GPipe pipe(model, {3, 3}, GPipeOptions().chunks(3));
  const auto x = torch::randn({6, 6});
  {
    torch::NoGradGuard no_grad;
    EXPECT_FALSE(pipe->forward(x).requires_grad());
  }
  pipe->eval();
  EXPECT_TRUE(torch::allclose(pipe->forward(x), model->forward(x)));
  c10::InferenceMode inference;
  EXPECT_TRUE(pipe->forward(x).is_inference());
}

TEST(GPipeTest, EvalWithGradientsStoresGraphsAndRecomputesNothing) {
  std::atomic<int> calls = 0;
  auto model = mlp(2, true);
  model->push_back(torch::nn::Functional([&calls](Tensor x) {
    ++calls;
    return x * 2;
  }));
  GPipe pipe(model, {3, static_cast<std::int64_t>(model->size()) - 3},
             GPipeOptions().chunks(3).checkpoint(Checkpoint::kAlways));
  pipe->eval();
  const auto x = torch::randn({6, 6}).requires_grad_();
  const auto loss = pipe->forward(x).pow(2).sum();
  EXPECT_TRUE(loss.requires_grad());
  const auto gradient = torch::autograd::grad({loss}, {x})[0];
  EXPECT_EQ(calls, 3);
  EXPECT_TRUE(torch::allclose(gradient, torch::autograd::grad({model->forward(x).pow(2).sum()}, {x})[0]));
  calls = 0;
  pipe->forward(Value(x), 2, Checkpoint::kAlways).tensor().sum().backward();
  EXPECT_EQ(calls, 4) << "asked for by name, it is recomputed in eval mode too";
}

TEST(GPipeTest, SeveralForwardsThenBackwardsInAnyOrder) {
  auto model = mlp(2);
  GPipe pipe(model, {1, 3}, GPipeOptions().chunks(2).checkpoint(Checkpoint::kAlways));
  const auto a = torch::randn({4, 6}).requires_grad_();
  const auto b = torch::randn({6, 6}).requires_grad_();
  const auto ya = pipe->forward(a);
  const auto yb = pipe->forward(b);
  { const auto dropped = pipe->forward(a); }
  ya.sum().backward();
  yb.sum().backward();
  const auto a_gradient = a.grad().clone();
  const auto b_gradient = b.grad().clone();
  a.mutable_grad() = Tensor();
  b.mutable_grad() = Tensor();
  pipe->forward(b).sum().backward();
  pipe->forward(a).sum().backward();
  EXPECT_TRUE(same(a.grad(), a_gradient));
  EXPECT_TRUE(same(b.grad(), b_gradient));
}

TEST(GPipeTest, RetainedGraphsGoBackwardTwiceAndOthersSayWhy) {
  auto model = mlp(2, true);
  for (const auto checkpoint : {Checkpoint::kNever, Checkpoint::kExceptLast, Checkpoint::kAlways}) {
    GPipe pipe(model, {3, 3}, GPipeOptions().chunks(3).checkpoint(checkpoint));
    const auto x = torch::randn({6, 6}).requires_grad_();
    const auto loss = pipe->forward(x).pow(2).sum();
    const auto first = torch::autograd::grad({loss}, {x}, {}, /*retain_graph=*/true)[0];
    const auto second = torch::autograd::grad({loss}, {x}, {}, /*retain_graph=*/true)[0];
    EXPECT_TRUE(same(first, second));
    loss.backward();
    EXPECT_TRUE(same(first, x.grad()));
    const auto y = pipe->forward(x);
    y.sum().backward();
    EXPECT_THROW(y.sum().backward(), c10::Error);
    const auto z = pipe->forward(x).sum();
    EXPECT_THROW(torch::autograd::grad({z}, {x}, {}, true, /*create_graph=*/true), c10::NotImplementedError);
  }
}

TEST(GPipeTest, BackwardOutlivesThePipeline) {
  auto model = mlp(2);
  Tensor loss;
  {
    GPipe pipe(model, {2, 2}, GPipeOptions().chunks(2));
    loss = pipe->forward(torch::randn({4, 6})).sum();
  }
  loss.backward();
  EXPECT_TRUE(model->parameters()[0].grad().defined());
}

TEST(GPipeTest, SeveralPipelinesAndThreads) {
  auto one = mlp(2);
  auto two = mlp(2);
  GPipe first(one, {2, 2}, GPipeOptions().chunks(2));
  GPipe second(two, {1, 3}, GPipeOptions().chunks(2));
  const auto x = torch::randn({4, 6}).requires_grad_();
  second->forward(first->forward(x)).sum().backward();
  const auto expected = x.grad().clone();
  x.mutable_grad() = Tensor();
  Tensor loss;
  std::thread([&] { loss = second->forward(first->forward(x)).sum(); }).join();
  std::thread([&] { loss.backward(); }).join();
  EXPECT_TRUE(same(x.grad(), expected));
  std::vector<std::thread> threads;
  std::vector<Tensor> outputs(4);
  for (auto& output : outputs) threads.emplace_back([&] { output = first->forward(x); });
  for (auto& thread : threads) thread.join();
  for (const auto& output : outputs) EXPECT_TRUE(same(output, outputs[0]));
}

TEST(GPipeTest, SplitSizeAndShortBatches) {
  std::vector<std::int64_t> seen;
  auto model = Sequential(Sized(&seen));
  GPipe pipe(model, {1}, GPipeOptions().split_size(3));
  pipe->forward(torch::zeros({8, 2}));
  EXPECT_EQ(seen, (std::vector<std::int64_t>{3, 3, 2}));
  seen.clear();
  GPipe chunked(model, {1}, GPipeOptions().chunks(4));
  chunked->forward(torch::zeros({2, 2}));
  EXPECT_EQ(seen, (std::vector<std::int64_t>{1, 1}));
  EXPECT_EQ(chunked->forward(torch::zeros({0, 2})).size(0), 0);
}

TEST(GPipeTest, StateHasTheKeysOfTheModel) {
  Sequential model({{"first", Linear(2, 3)}, {"second", Linear(3, 2)}});
  GPipe pipe(model, {1, 1});
  EXPECT_EQ(pipe->named_parameters().keys(), model->named_parameters().keys());
  std::stringstream file;
  torch::save(pipe, file);
  Sequential loaded({{"first", Linear(2, 3)}, {"second", Linear(3, 2)}});
  torch::load(loaded, file);
  EXPECT_TRUE(same(loaded->parameters()[0], model->parameters()[0]));
}

TEST(GPipeTest, LoadsTheStateOfTheModelAtAnyBalance) {
  const auto build = [] { return Sequential({{"first", Linear(2, 3)}, {"second", torch::nn::BatchNorm1d(3)}}); };
  auto trained = build();
  trained->forward(torch::randn({4, 2}));
  std::stringstream file;
  torch::save(trained, file);
  for (const auto& balance : {std::vector<std::int64_t>{2}, {1, 1}}) {
    GPipe pipe(build(), balance);
    file.clear();
    file.seekg(0);
    torch::load(pipe, file);
    for (const auto& buffer : trained->named_buffers()) {
      EXPECT_TRUE(same(pipe->named_buffers()[buffer.key()], buffer.value())) << buffer.key();
    }
    EXPECT_TRUE(same(pipe->parameters()[0], trained->parameters()[0]));
  }
}

TEST(GPipeTest, ThreadsComeAndGoWithItAndSettingsStay) {
  { GPipe warm_up(mlp(1), {1, 1}); }
  const auto threads = thread_count();
  const int intraop = torch::get_num_threads();
  {
    GPipe pipe(mlp(2), {2, 1, 1}, GPipeOptions().intraop_threads(1));
    EXPECT_EQ(thread_count(), threads + 3);
    pipe->forward(torch::randn({4, 6})).sum().backward();
    EXPECT_EQ(torch::get_num_threads(), intraop);
    int elsewhere = 0;
    std::thread([&] { elsewhere = torch::get_num_threads(); }).join();
    EXPECT_EQ(elsewhere, intraop);
  }
  EXPECT_EQ(thread_count(), threads);
}

TEST(GPipeTest, WorkersKeepTheirNumberOfThreads) {
  const int before = torch::get_num_threads();
  torch::set_num_threads(3);
  std::mutex mutex;
  std::set<int> seen;
  auto model = Sequential(Linear(6, 6), torch::nn::Functional([&](Tensor x) {
                            at::parallel_for(0, 4, 1, [](std::int64_t, std::int64_t) {});
                            const std::lock_guard<std::mutex> lock(mutex);
                            seen.insert(torch::get_num_threads());
                            return x * 2;
                          }));
  GPipe pipe(model, {1, 1}, GPipeOptions().chunks(2).checkpoint(Checkpoint::kAlways).intraop_threads(2));
  pipe->forward(torch::randn({4, 6})).sum().backward();
  EXPECT_EQ(seen, std::set<int>{2});
  GPipe shared(model, {1, 1});
  seen.clear();
  shared->forward(torch::randn({4, 6}));
  EXPECT_EQ(seen, std::set<int>{1}) << "half of three";
  torch::set_num_threads(before);
}

TEST(GPipeTest, RunsUnderAutocastInForwardAndRecompute) {
  auto model = mlp(2);
  GPipe pipe(model, {2, 2}, GPipeOptions().chunks(2).checkpoint(Checkpoint::kAlways));
  const auto x = torch::randn({4, 6}).requires_grad_();
  at::autocast::set_autocast_enabled(at::kCPU, true);
  const auto y = pipe->forward(x);
  at::autocast::set_autocast_enabled(at::kCPU, false);
  at::autocast::clear_cache();
  EXPECT_EQ(y.scalar_type(), torch::kBFloat16);
  y.sum().backward();
  EXPECT_EQ(x.grad().scalar_type(), torch::kFloat32);
}

TEST(GPipeTest, RefusesWhatCannotWork) {
  auto model = mlp(2);
  const auto make = [&](std::vector<std::int64_t> balance, GPipeOptions options = {}) {
    GPipe pipe(model, std::move(balance), std::move(options));
  };
  EXPECT_THROW(make({}), std::invalid_argument);
  EXPECT_THROW(make({2, 1}), std::invalid_argument);
  EXPECT_THROW(make({4, 0}), std::invalid_argument);
  EXPECT_THROW(make({5, -1}), std::invalid_argument);
  EXPECT_THROW(make({2, 2}, GPipeOptions().chunks(0)), std::invalid_argument);
  EXPECT_THROW(make({2, 2}, GPipeOptions().split_size(-1)), std::invalid_argument);
  EXPECT_THROW(make({2, 2}, GPipeOptions().chunks(2).split_size(2)), std::invalid_argument);
  EXPECT_THROW(make({2, 2}, GPipeOptions().intraop_threads(-1)), std::invalid_argument);
  EXPECT_THROW(make({2, 2}, GPipeOptions().devices({torch::kCPU})), std::out_of_range);
  EXPECT_THROW(make({2, 2}, GPipeOptions().devices({torch::kCPU, torch::Device("cuda:63")})), std::out_of_range);
  EXPECT_THROW(make({2, 2}, GPipeOptions().devices({torch::kCPU, torch::kMeta})), std::out_of_range);
  EXPECT_THROW(GPipe(Sequential(), {}), std::invalid_argument);
  auto linear = Linear(2, 2);
  EXPECT_THROW(GPipe(Sequential(linear, linear), {1, 1}), std::invalid_argument);
  auto tied = Linear(2, 2);
  tied->weight = tied->register_parameter("tied", linear->weight);
  EXPECT_THROW(GPipe(Sequential(linear, tied), {1, 1}), std::invalid_argument);
  EXPECT_NO_THROW(GPipe(Sequential(linear, tied), {2}));

  GPipe pipe(model, {2, 2}, GPipeOptions().chunks(2));
  EXPECT_THROW(pipe->to(torch::kCPU), c10::TypeError);
  EXPECT_THROW(pipe->forward(Tensor()), std::invalid_argument);
  EXPECT_THROW(pipe->forward(torch::tensor(1.0)), std::invalid_argument);
  EXPECT_THROW(pipe->forward(std::vector<Tensor>{}), std::invalid_argument);
  EXPECT_THROW(pipe->forward({torch::zeros({4, 6}), torch::zeros({3, 6})}), std::invalid_argument);
  pipe->to(torch::kFloat64);
  EXPECT_EQ(pipe->forward(torch::zeros({4, 6}, torch::kFloat64)).scalar_type(), torch::kFloat64);
}

TEST(GPipeTest, ALeafThatIsNoParameterIsRefused) {
  auto stray = torch::ones({6}).requires_grad_();
  auto model = Sequential(torch::nn::Functional([stray](Tensor x) { return x * stray; }));
  GPipe pipe(model, {1}, GPipeOptions().chunks(2));  // one cell alone may have made the leaf
  EXPECT_THROW(pipe->forward(torch::ones({2, 6}).requires_grad_()), std::invalid_argument);
}

// The last stage's backward waits for the recompute, so that the order does not hang on how fast the machine is.
TEST(GPipeTest, TraceShowsRecomputeBeforeItsGradientArrives) {
  auto recomputes = std::make_shared<Counter>();
  auto model = Sequential(Recomputes(recomputes), WaitInBackward(recomputes));
  GPipe pipe(model, {1, 1}, GPipeOptions().chunks(3).checkpoint(Checkpoint::kAlways));
  auto timeline = std::make_shared<Timeline>();
  pipe->trace(timeline);
  pipe->forward(torch::randn({6, 6})).sum().backward();
  pipe->trace(nullptr);
  pipe->forward(torch::randn({6, 6}));
  EXPECT_EQ(timeline->spans.size(), 2U * 3U * 3U);
  const auto find = [&](Action action) {
    for (const auto& span : timeline->spans) {
      if (span.action == action) return span;
    }
    throw std::logic_error("no " + to_string(action));
  };
  for (int i = 0; i < 3; ++i) {
    EXPECT_LT(find({Kind::R, 0, i}).end, find({Kind::B, 1, i}).end) << "micro-batch " << i;
  }
  const auto json = nlohmann::json::parse(to_chrome_json(*timeline));
  EXPECT_FALSE(json.at("traceEvents").empty());
}

struct Injected : std::exception {
  const char* what() const noexcept override { return "injected"; }
};

TEST(GPipeTest, ErrorsAreTheOriginalsAndLeaveNoTrace) {
  auto plan = std::make_shared<FaultPlan>();
  const auto build = [&](std::shared_ptr<FaultPlan> faults) {
    torch::manual_seed(9);
    return Sequential(Linear(6, 6), torch::nn::BatchNorm1d(6), torch::nn::Dropout(0.5), Faulty(faults), Linear(6, 6));
  };
  auto model = build(plan);
  auto twin = build(std::make_shared<FaultPlan>());
  const auto options = GPipeOptions().chunks(3).checkpoint(Checkpoint::kAlways);
  GPipe pipe(model, {2, 3}, options);
  GPipe healthy(twin, {2, 3}, options);
  const auto x = torch::randn({6, 6});
  for (const auto where : {FaultPlan::kForward, FaultPlan::kRecompute, FaultPlan::kBackward}) {
    const auto state = at::detail::getDefaultCPUGenerator().get_state();
    plan->arm(where, [] { throw Injected(); });
    if (where == FaultPlan::kForward) {
      EXPECT_THROW(pipe->forward(x), Injected);
      EXPECT_TRUE(torch::equal(at::detail::getDefaultCPUGenerator().get_state(), state));
    } else {
      const auto loss = pipe->forward(x).sum();
      EXPECT_THROW(loss.backward(), Injected);
      EXPECT_THROW(loss.backward(), c10::Error);
      healthy->forward(x);
    }
    const auto error = pipe->last_error();
    ASSERT_TRUE(error.has_value());
    EXPECT_EQ(error->action.stage, 1);
    EXPECT_EQ(error->message, "injected");
    if (where != FaultPlan::kBackward) {
      EXPECT_EQ(error->layer, 3);
      EXPECT_EQ(error->layer_name, "3");
    }
    plan->disarm();
    for (const auto& parameter : model->parameters()) EXPECT_FALSE(parameter.grad().defined());
    torch::manual_seed(3);
    pipe->forward(x).sum().backward();
    torch::manual_seed(3);
    healthy->forward(x).sum().backward();
    EXPECT_FALSE(pipe->last_error().has_value());
    for (std::size_t i = 0; i < model->parameters().size(); ++i) {
      EXPECT_TRUE(same(model->parameters()[i].grad(), twin->parameters()[i].grad()));
    }
    for (std::size_t i = 0; i < model->buffers().size(); ++i) {
      EXPECT_TRUE(same(model->buffers()[i], twin->buffers()[i])) << "buffer " << i;
    }
    model->zero_grad();
    twin->zero_grad();
  }
}

TEST(GPipeTest, WhatIsNoExceptionBecomesOneInARecompute) {
  auto plan = std::make_shared<FaultPlan>();
  auto model = Sequential(Linear(6, 6), Faulty(plan));
  GPipe pipe(model, {1, 1}, GPipeOptions().chunks(2).checkpoint(Checkpoint::kAlways));
  const auto x = torch::randn({4, 6});
  for (int i = 0; i < 100; ++i) {  // the engine survives sixty of the originals
    const auto loss = pipe->forward(x).sum();
    plan->arm(FaultPlan::kRecompute, [] { throw 7; });
    EXPECT_THROW(loss.backward(), std::runtime_error);
    EXPECT_EQ(pipe->last_error()->message, "unknown");
    plan->disarm();
  }
  EXPECT_NO_THROW(pipe->forward(x).sum().backward());
}

TEST(GPipeTest, ARefusedCallIsNotTheLastOnesError) {
  auto model = Sequential(Linear(6, 6), Linear(5, 5));
  GPipe pipe(model, {1, 1});
  EXPECT_THROW(pipe->forward(torch::randn({4, 6})), c10::Error);
  EXPECT_TRUE(pipe->last_error().has_value());
  EXPECT_THROW(pipe->forward(torch::Tensor()), std::invalid_argument);
  EXPECT_FALSE(pipe->last_error().has_value());
}

TEST(GPipeTest, TorchErrorsGainContext) {
  auto model = Sequential(Linear(6, 6), Linear(5, 5));
  GPipe pipe(model, {1, 1}, GPipeOptions().chunks(2));
  try {
    pipe->forward(torch::randn({4, 6}));
    FAIL() << "expected an error";
  } catch (const c10::Error& error) {
    EXPECT_NE(std::string(error.what()).find("stage 1"), std::string::npos) << error.what();
  }
  EXPECT_EQ(pipe->last_error()->layer, 1);
}

TEST(GPipeTest, BuffersAreUpdatedOnceAMicroBatchWhateverIsRecomputed) {
  for (const auto checkpoint : {Checkpoint::kNever, Checkpoint::kExceptLast, Checkpoint::kAlways}) {
    auto norm = torch::nn::BatchNorm1d(6);
    GPipe pipe(Sequential(norm), {1}, GPipeOptions().chunks(4).checkpoint(checkpoint));
    pipe->forward(torch::randn({8, 6}).requires_grad_()).sum().backward();
    EXPECT_EQ(norm->num_batches_tracked.item<std::int64_t>(), 4);
  }
}

TEST(GPipeTest, AllMemoryIsFreed) {
  for (const auto checkpoint : {Checkpoint::kNever, Checkpoint::kExceptLast, Checkpoint::kAlways}) {
    Peak first;
    Peak second;
    const auto live = [&] { return first->live->now + second->live->now; };
    GPipe pipe(Sequential(Linear(6, 6), first, Linear(6, 6), second), {2, 2},
               GPipeOptions().chunks(3).checkpoint(checkpoint));
    { const auto y = pipe->forward(torch::randn({6, 6})); }
    EXPECT_EQ(live(), 0) << "a backward that never comes";
    const auto loss = pipe->forward(torch::randn({6, 6})).sum();
    EXPECT_EQ(live(), checkpoint == Checkpoint::kNever ? 6 : checkpoint == Checkpoint::kExceptLast ? 2 : 0);
    loss.backward();
    EXPECT_EQ(live(), 0);
    torch::NoGradGuard no_grad;
    const auto y = pipe->forward(torch::randn({6, 6}));
    EXPECT_EQ(live(), 0);
  }
}

TEST(GPipeTest, NestedSequentialIsALayerAndAModel) {
  NestedSequential inner{{"a", Linear(6, 6)}, {"b", torch::nn::ReLU()}};
  Sequential model(inner, Linear(6, 2));
  GPipe pipe(model, {1, 1}, GPipeOptions().chunks(2));
  EXPECT_EQ(pipe->named_parameters().keys().front(), "0.a.weight");
  EXPECT_EQ(pipe->forward(torch::randn({4, 6})).size(1), 2);
  GPipe alone(inner, {1, 1});
  EXPECT_EQ(alone->forward(torch::randn({4, 6})).size(1), 6);
}

}  // namespace
}  // namespace gpipe
