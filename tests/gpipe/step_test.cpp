#include <ATen/autocast_mode.h>

#include <fstream>

#include "gpipe/schedule_source.h"
#include "gpipe/schedules.h"
#include "tests/gpipe/instruments.h"
#include "tests/gpipe/layers.h"

namespace gpipe {
namespace {

namespace nn = torch::nn;

nn::Sequential small_model() {
  torch::manual_seed(1);
  nn::Sequential model(nn::Linear(6, 8), nn::Tanh(), nn::Linear(8, 8), nn::Tanh(), nn::Linear(8, 5));
  model->to(torch::kDouble);
  return model;
}

GPipeOptions options(const std::string& schedule, std::int64_t chunks = 4) {
  return GPipeOptions().schedule(schedule).chunks(chunks).intraop_threads(1);
}

class Step : public ::testing::Test {
 protected:
  /// Expects a step to have the loss of the bare model, and its gradients.
  void expect_step_of(const Tensor& loss, const std::function<StepResult()>& step) {
    loss.backward();
    const auto expected = take_gradients(*model);
    const auto result = step();
    EXPECT_TRUE(torch::allclose(result.loss, loss.detach(), 1e-12, 1e-12));
    EXPECT_FALSE(result.loss.requires_grad());
    expect_close(take_gradients(*model), expected, 1e-12, 1e-12);
  }

  // Seven samples, in four micro-batches of 2, 2, 2 and 1.
  nn::Sequential model = small_model();
  const Tensor x = torch::randn({7, 6}, torch::kDouble);
  const Tensor y = torch::randn({7, 5}, torch::kDouble);
  GPipe pipe{model, {2, 3}, options("1f1b")};
};

TEST_F(Step, WeighsMicroBatchesByTheirCount) {
  const auto classes = torch::tensor({0, -100, -100, -100, 4, 2, 1});  // the second micro-batch counts nothing
  const auto step = [&](const Tensor& target, CountFunction count) {
    const auto loss = tensor_loss([](const Tensor& out, const Tensor& t) { return torch::cross_entropy_loss(out, t); });
    return pipe->step(x, target, loss, StepOptions().count(std::move(count)));
  };
  const auto count = [](const Value& target) { return target.tensor().ne(-100).sum().item<double>(); };
  expect_step_of(torch::cross_entropy_loss(model->forward(x), classes), [&] { return step(classes, count); });
  EXPECT_THAT([&] { step(torch::full_like(classes, -100), count); }, refused("count is 0 for every micro-batch"));
  EXPECT_THAT([&] { step(classes, [](const Value&) { return -1; }); }, refused("count returned -1"));
  const auto tensors = [](const Value& target) { return target.tensor().ne(-100); };
  EXPECT_THAT([&] { step(classes, tensors); }, refused("count returned a tensor of shape [2] for micro-batch 0"));
  expect_step_of(torch::cross_entropy_loss(model->forward(x), classes),
                 [&] { return step(classes, [&](const Value& target) { return tensors(target).sum(); }); });
}

// Of the targets of the micro-batches, 1, 1, 2 and 0 count.
TEST_F(Step, ReadsTheOptionsOfLossModules) {
  const auto classes = torch::tensor({0, 3, 3, 2, 4, 1, 3});
  const auto weight = torch::rand({5}, torch::kDouble);
  const auto expect_equal_to_bare = [&](auto loss, const Tensor& target) {
    expect_step_of(loss(model->forward(x), target), [&] { return pipe->step(x, target, tensor_loss(loss)); });
  };
  expect_equal_to_bare(nn::CrossEntropyLoss(nn::CrossEntropyLossOptions().ignore_index(3).weight(weight)), classes);
  expect_equal_to_bare(nn::CrossEntropyLoss(nn::CrossEntropyLossOptions().reduction(torch::kSum)), classes);
  expect_equal_to_bare(nn::MSELoss(nn::MSELossOptions(torch::kSum)), y);
  model = nn::Sequential(nn::Linear(6, 200));
  model->to(torch::kDouble);
  pipe = GPipe(model, {1}, options("1f1b"));
  const auto bytes = torch::tensor({156, 156, 3, 4, 156, 199, 7}, torch::kByte);  // as a byte, -100 is 156
  expect_equal_to_bare(nn::CrossEntropyLoss(), bytes);
}

// A step compares a loss once, which calls it for all seven samples, and again when it gets a target of another range.

Tensor sum_loss(const Tensor& out, const Tensor& target) { return (out - target).square().sum(); }
auto differs() { return refused("the loss of the whole mini-batch is"); }

TEST_F(Step, ComparesEachLossFunctionOnce) {
  EXPECT_THAT([&] { pipe->step(x, y, tensor_loss(sum_loss)); }, differs());
  pipe->step(x, y, tensor_loss(sum_loss), kOfSums);
  int comparisons = 0;
  const auto scaled = [&](const std::vector<double>& factors) {  // not trivially copyable
    return [factors, &comparisons](const Value& out, const Value& target) {
      comparisons += target.tensor().size(0) == 7;
      const auto squares = (out.tensor() - target.tensor()).square();
      return factors.front() == 0 ? squares.mean() : squares.sum() * factors.front();
    };
  };
  const LossFunction mean = scaled({0});
  const LossFunction copy = mean;
  for (const auto& loss : {mean, copy, mean}) pipe->step(x, y, loss);
  EXPECT_EQ(comparisons, 1);
  EXPECT_THAT([&] { pipe->step(x, y, scaled({2})); }, differs());
  EXPECT_THAT([&] { pipe->step(x, y, scaled({3})); }, differs());
  const auto wrong = [](const Value& target) { return target.tensor().size(0) == 2 ? 1 : 2; };
  EXPECT_THAT([&] { pipe->step(x, y, mean, StepOptions().count(wrong)); }, differs());
}

// A loss whose state does not change its value.
struct CountingLossImpl : nn::Module {
  Tensor forward(const Tensor& out, const Tensor& target) {
    calls += 1;
    return torch::mse_loss(out, target);
  }
  Tensor calls = register_buffer("calls", torch::zeros({}));
};
TORCH_MODULE(CountingLoss);

// Not the mean that its options promise.
struct OtherLossImpl : nn::MSELossImpl {
  Tensor forward(const Tensor& out, const Tensor& target) { return sum_loss(out, target); }
};
TORCH_MODULE(OtherLoss);

TEST_F(Step, ComparesModulesThatAreNotTorchs) {
  CountingLoss loss;
  pipe->step(x, y, tensor_loss(loss));
  EXPECT_EQ(loss->calls.item<int>(), 4) << "the comparison leaves its buffers";
  EXPECT_THAT([&] { pipe->step(x, y, tensor_loss(OtherLoss())); }, differs());
}

TEST_F(Step, ComparesAgainWhenTargetsComeThatALossMayIgnore) {
  const auto masked = [](const Tensor& out, const Tensor& target) {
    return out.index({((target > 0) & (target < 9)).all(1)}).square().mean();  // not NaN
  };
  const auto weighted = [](const Tensor& out, const Tensor& weight) {
    return (out.square().mean(1) * weight.mean(1)).sum() / weight.mean(1).sum();
  };
  const auto expect_compared = [&](auto loss, const Tensor& first, const Tensor& samples, double later) {
    const auto function = tensor_loss(loss);
    pipe->step(x, first, function);
    EXPECT_THAT([&] { pipe->step(x, first.index_fill(0, samples, later), function); }, differs()) << later;
  };
  const auto one = torch::tensor({0});
  for (const double ignored : {0.0, -1.0, std::nan(""), 9.0})
    expect_compared(masked, torch::ones_like(y), one, ignored);
  const auto within = [](const Tensor& out, const Tensor& target) {
    return out.index({(target.abs() < 9).all(1)}).square().mean();
  };
  for (const double sign : {1, -1}) expect_compared(within, (1 + torch::rand_like(y)) * sign, one, 9 * sign);
  expect_compared(weighted, torch::ones_like(y), one, 0.5);
  for (const int padding : {0, 2, 255}) {
    const auto of_classes = [padding](const Tensor& out, const Tensor& target) {
      return torch::cross_entropy_loss(out, target, {}, at::Reduction::Mean, padding);
    };
    expect_compared(of_classes, torch::tensor({1, 3, 3, 4, 1, 4, 3}), torch::tensor({3, 4, 5, 6}), padding);
  }
  // A part of the mini-batch has no sample that counts, so that its mean is 0 / 0.
  const auto of_pair = [&](const Value& out, const Value& target) {
    return weighted(out.tensor(), target.tensors()[1].unsqueeze(1));
  };
  const std::vector<Tensor> pair = {y, torch::tensor({0, 0, 1, 1, 1, 1, 1}, torch::kDouble)};
  EXPECT_THAT([&] { pipe->step(x, pair, of_pair); }, refused("the micro-batches give nan"));
  pipe->step(torch::full_like(x, std::nan("")), pair, of_pair);
}

TEST_F(Step, SumsOfALaterStepNeedNoMemoryBesideGrad) {
  const auto bytes_after = [&] {
    const auto timeline = std::make_shared<Timeline>();
    pipe->trace(timeline);
    pipe->step(x, y, kMse);
    std::vector<std::int64_t> of_workers(timeline->workers);
    for (const auto& span : timeline->spans) of_workers[span.worker] = span.bytes.after;
    return std::accumulate(of_workers.begin(), of_workers.end(), std::int64_t{0});
  };
  std::int64_t gradients = 0;
  for (const auto& parameter : model->parameters()) gradients += static_cast<std::int64_t>(parameter.nbytes());
  const auto first = bytes_after();
  EXPECT_LE(bytes_after(), first - gradients / 2);  // a worker may still hold what it has sent
}

// A hook or another thread may look at .grad meanwhile. A parameter with a hook gets no sum of a part.
TEST_F(Step, ALaterStepAddsInPlaceAndHooksSeeItsSums) {
  pipe->step(x, y, kMse);
  const auto sums = take_gradients(*model);
  pipe->step(x, y, kMse);
  const auto looks = [&](const Value& out, const Value& target) {
    EXPECT_TRUE(model->parameters().front().grad().defined());
    return kMse(out, target);
  };
  pipe->step(x, y, looks);
  std::vector<Tensor> seen;
  for (const auto& parameter : model->parameters()) {
    parameter.register_hook([&](const Tensor& gradient) { seen.push_back(gradient.clone()); });
  }
  pipe->step(x, y, kMse);
  ASSERT_EQ(seen.size(), sums.size());
  for (const auto& gradient : seen) {
    EXPECT_EQ(std::ranges::count_if(sums, [&](const auto& each) { return torch::equal(each, gradient); }), 1);
  }
}

TEST_F(Step, LossHandsOutItsGradientsOnce) {
  pipe->step(x, y, kMse);
  const auto expected = take_gradients(*model);
  int hooks = 0;
  for (auto& parameter : model->parameters()) {
    if (parameter.dim() == 2) parameter.register_hook([&](const Tensor&) { ++hooks; });
  }
  const auto loss = pipe->compute_loss(x, y, kMse);
  EXPECT_TRUE(loss.requires_grad());
  EXPECT_EQ(hooks, 0);
  EXPECT_TRUE(same(take_gradients(*model), std::vector<Tensor>(6)));
  auto fourfold = torch::autograd::grad({loss * 4}, model->parameters(), {}, /*retain_graph=*/true);
  for (auto& gradient : fourfold) gradient /= 4;
  EXPECT_TRUE(same(fourfold, expected));
  loss.backward();
  EXPECT_TRUE(same(take_gradients(*model), expected));
  EXPECT_EQ(hooks, 6);
  EXPECT_THROW(loss.backward(), c10::Error);
}

TEST_F(Step, CallsTheLossOncePerMicroBatchAndReturnsTheOutputOnRequest) {
  for (const std::string schedule : {"gpipe", "1f1b", "zb_h2", "interleaved_zb"}) {
    for (const auto checkpoint : kModes) {
      const int per_worker = schedule.starts_with("interleaved") ? 2 : 1;
      GPipe by_schedule(model, {2, 1, 1, 1}, options(schedule).stages_per_worker(per_worker).checkpoint(checkpoint));
      int calls = 0;
      const auto counting = [&](const Value& out, const Value& target) {
        ++calls;
        EXPECT_FALSE(is_recomputing());
        return kMse(out, target);
      };
      const auto no_check = StepOptions().check(false);
      EXPECT_TRUE(by_schedule->step(x, y, counting, no_check).output.tensors().empty());
      EXPECT_EQ(calls, 4);
      const auto output = by_schedule->step(x, y, counting, StepOptions(no_check).return_output(true)).output.tensor();
      EXPECT_TRUE(torch::allclose(output, model->forward(x), 1e-12, 1e-12));
      EXPECT_FALSE(output.requires_grad());
    }
  }
}

// The last stage passes its input on, so the loss writes into it.
TEST_F(Step, TheLossMayChangeTheOutputInPlace) {
  const auto in_place = tensor_loss([](const Tensor& out, const Tensor& t) { return out.sub_(t).square().mean(); });
  model->push_back(nn::Flatten());
  for (const auto checkpoint : kModes) {
    GPipe pipe(model, {2, 3, 1}, options("1f1b").checkpoint(checkpoint));
    for (int i = 0; i < 3; ++i) {
      expect_step_of(torch::mse_loss(model->forward(x), y), [&] { return pipe->step(x, y, in_place); });
    }
  }
}

TEST_F(Step, AMicroBatchOfWeightZeroCannotSpoilTheOthers) {
  const auto spoilt = x.clone();
  spoilt[2].fill_(std::numeric_limits<double>::quiet_NaN());
  const auto finite = [&](const Value& target) { return torch::equal(target.tensor(), y.slice(0, 2, 4)) ? 0.0 : 2.0; };
  const auto result = pipe->step(spoilt, y, kMse, StepOptions().count(finite));
  EXPECT_TRUE(result.loss.isfinite().item<bool>());
  for (const auto& gradient : take_gradients(*model)) EXPECT_TRUE(gradient.isfinite().all().item<bool>());
}

// Stage 1 changes the tensor that stage 0 has passed on, while stage 0 recomputes from it.
TEST_F(Step, RecomputesFromACopyOfAnInputThatALaterStageChangesInPlace) {
  std::atomic<bool> recomputing = false;
  std::atomic<bool> changed = false;
  const auto wait_for = [](const std::atomic<bool>& flag) {
    while (!flag) std::this_thread::yield();
  };
  const auto first = function_layer([&](std::vector<Tensor> in) -> std::vector<Tensor> {
    if (is_recomputing()) {
      recomputing = true;
      wait_for(changed);
    }
    return {torch::tanh(in[0] + in[1]), in[1]};
  });
  const auto second = function_layer([&](std::vector<Tensor> in) -> Tensor {
    if (!is_recomputing()) wait_for(recomputing);
    in[1].mul_(2);
    changed = true;
    return in[0] + in[1];
  });
  const auto a = torch::randn({8, 6}, torch::kDouble).requires_grad_();
  const auto b = torch::randn({8, 6}, torch::kDouble);
  const auto y = torch::randn({8, 6}, torch::kDouble);
  const auto expected = gradient_of(torch::mse_loss(torch::tanh(a + b) + 2 * b, y), a);
  GPipe pipe(Sequential(first, second), {1, 1}, options("gpipe", 1).checkpoint(Checkpoint::kAlways));
  for (int step = 0; step < 3; ++step) {
    recomputing = changed = false;
    a.mutable_grad().reset();
    pipe->step(std::vector<Tensor>{a, b.clone()}, y, kMse);
    EXPECT_TRUE(torch::allclose(a.grad(), expected, 1e-12, 1e-12)) << step;
  }
}

TEST_F(Step, RefusesWhatItCannotDo) {
  const auto with_loss = [&](auto function) { return [this, function] { pipe->step(x, y, tensor_loss(function)); }; };
  EXPECT_THAT(with_loss([](const Tensor& out, const Tensor&) { return out; }),
              refused("return a floating-point scalar"));
  EXPECT_THAT(with_loss([](const Tensor& out, const Tensor&) { return out.detach().sum(); }),
              refused("does not depend on the model's output"));
  EXPECT_THAT(with_loss([](const Tensor&, const Tensor&) { return Tensor(); }), refused("undefined"));
  EXPECT_THAT(with_loss([](const Tensor& out, Tensor t) { return torch::mse_loss(out, t.mul_(2)); }),
              throws<std::runtime_error>("changed its target in place"));
  EXPECT_THAT([&] { pipe->step(x, y, LossFunction()); }, refused("the loss function is empty"));
  EXPECT_THAT([&] { pipe->step(x, y.slice(0, 1), kMse); }, refused("the target has 6 samples, but the input has 7"));
  EXPECT_THAT([&] { pipe->step(x, y.clone().requires_grad_(), kMse); }, refused("a target requires grad"));
  EXPECT_THAT([&] { pipe->step(x, y, kMse, StepOptions().scale(0)); }, refused("scale must be finite and positive"));
  EXPECT_THAT([&] { pipe->step(x.slice(0, 0, 0), y.slice(0, 0, 0), kMse); }, refused("no samples"));
  const auto evaluates = throws<std::runtime_error>("or call forward(), or evaluate() in Python");
  {
    torch::NoGradGuard no_grad;
    EXPECT_THAT([&] { pipe->step(x, y, kMse); }, evaluates);
  }
  pipe->eval();
  EXPECT_THAT([&] { pipe->step(x, y, kMse); }, evaluates);
  EXPECT_TRUE(same(take_gradients(*model), std::vector<Tensor>(6)));
}

TEST_F(Step, RunsSchedulesFromAFileOrAFunction) {
  GPipe named(model, {2, 1, 1, 1}, options("interleaved_1f1b").stages_per_worker(2));
  named->step(x, y, kMse);
  const auto expected = take_gradients(*model);

  const TemporaryDirectory folder;
  const auto path = folder / "schedule.txt";
  std::ofstream(path) << to_text(make_schedule("interleaved_1f1b", named->program(4)->layout(), Checkpoint::kNever));
  GPipe from_file(model, {2, 1, 1, 1}, options("@" + path.string()));
  EXPECT_EQ(from_file->placement(), (std::vector<int>{0, 1, 0, 1}));
  EXPECT_EQ(from_file->devices().size(), 2u);
  from_file->step(x, y, kMse);
  EXPECT_TRUE(same(take_gradients(*model), expected));
  EXPECT_EQ(to_text(from_file->program(4)->schedule()), to_text(named->program(4)->schedule()));
  EXPECT_THAT([&] { from_file->step(x.slice(0, 0, 3), y.slice(0, 0, 3), kMse); },
              refused("has 4 micro-batches, but the mini-batch is cut into 3"));

  GPipe* calling = nullptr;
  const auto by_function = [&](const Balance& balance, ScheduleFunction function) {
    GPipe own(model, balance, options("gpipe").schedule_function(std::move(function)));
    calling = &own;
    own->step(x, y, kMse);
  };
  std::vector<int> micro_batches;
  by_function({2, 3}, [&](const Layout& of) {
    micro_batches.push_back(of.micro_batches);
    EXPECT_FALSE((*calling)->last_error());
    return make_schedule("1f1b", of, Checkpoint::kNever);
  });
  expect_close(take_gradients(*model), expected, 1e-12, 1e-12);
  EXPECT_EQ(micro_batches, std::vector<int>{4});
  EXPECT_THAT([&] { by_function({2, 3}, [](const Layout& of) { return fill(of); }); }, refused("no backward"));
  EXPECT_THAT(
      [&] {
        by_function({5}, [](const Layout&) { return parse_schedule("0F0 0R0 0F1 0B0 0B1 0F2 0B2 0F3 0B3").schedule; });
      },
      refused("has 0F1 between 0R0 and its B"));
}

// A step in autocast, and a backward outside of a forward in autocast.
TEST_F(Step, RunsForwardsUnderAutocastAndBackwardsOutside) {
  std::set<std::string> seen;
  const auto note = [&](const std::string& pass) {
    seen.insert(pass + (at::autocast::is_autocast_enabled(at::kCPU) ? " in autocast" : " outside"));
  };
  nn::Sequential model(nn::Linear(6, 6), Functional([&](Tensor x) {
                         note(is_recomputing() ? "recompute" : "forward");
                         return on_backward(x, [&] { note("backward"); });
                       }));
  GPipe pipe(model, {2}, options("gpipe").checkpoint(Checkpoint::kAlways));
  const auto x = torch::randn({8, 6});
  const std::set<std::string> expected = {"forward in autocast", "recompute in autocast", "backward outside"};
  at::autocast::set_autocast_enabled(at::kCPU, true);
  pipe->step(x, torch::randn({8, 6}), kMse);
  EXPECT_EQ(std::exchange(seen, {}), expected);
  const auto output = pipe->forward(x);
  at::autocast::set_autocast_enabled(at::kCPU, false);
  at::autocast::clear_cache();
  EXPECT_EQ(output.scalar_type(), torch::kBFloat16);
  output.sum().backward();
  EXPECT_EQ(seen, expected);
}

TEST_F(Step, CheckLossTellsWhetherALossDecomposes) {
  torch::manual_seed(1);
  const auto out = torch::rand({7, 5}, torch::kDouble);
  const auto target = torch::rand({7, 5}, torch::kDouble);
  const auto mean = check_loss(kMse, out, target, 4);
  EXPECT_NEAR(mean.whole, mean.from_micro_batches, 1e-12);
  const auto dice =
      tensor_loss([](const Tensor& a, const Tensor& b) { return 1 - 2 * (a * b).sum() / (a.sum() + b.sum()); });
  const auto joined = check_loss(dice, out, target, 4);
  EXPECT_GT(std::abs(joined.whole - joined.from_micro_batches), 1e-4);
  const auto longer = torch::rand({9, 5}, torch::kDouble);
  EXPECT_THAT([&] { check_loss(kMse, out, longer, 4); }, refused("the target has 9 samples"));
}

}  // namespace
}  // namespace gpipe
