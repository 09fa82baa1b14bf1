// Steps with a loss. The generated cases compare their results with the reference.
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
    return pipe->step(x, target, kCrossEntropy, StepOptions().count(std::move(count)));
  };
  const auto count = [](const Value& target) { return target.tensor().ne(-100).sum().item<double>(); };
  expect_step_of(torch::cross_entropy_loss(model->forward(x), classes), [&] { return step(classes, count); });
  EXPECT_THAT([&] { step(torch::full_like(classes, -100), count); }, refused("count is 0 for every micro-batch"));
  EXPECT_THAT([&] { step(classes, [](const Value&) { return -1; }); }, refused("count returned -1"));
  const auto tensors = [](const Value& target) { return target.tensor().ne(-100); };
  EXPECT_THAT([&] { step(classes, tensors); }, refused("count returned a tensor of shape [2] for micro-batch 0"));
  const auto scalars = [&](const Value& target) { return tensors(target).sum(); };
  expect_step_of(torch::cross_entropy_loss(model->forward(x), classes), [&] { return step(classes, scalars); });
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

bool is_equal_to_one_of(const Tensor& tensor, const std::vector<Tensor>& others) {
  return std::ranges::any_of(others, [&](const Tensor& other) { return torch::equal(other, tensor); });
}
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

TEST_F(Step, ComparesModulesThatAreNotTorchs) {
  struct CountingLoss : nn::Module {
    Tensor forward(const Tensor& out, const Tensor& target) {
      calls += 1;
      return torch::mse_loss(out, target);
    }
    Tensor calls = register_buffer("calls", torch::zeros({}));
  };
  nn::ModuleHolder<CountingLoss> loss;
  pipe->step(x, y, tensor_loss(loss));
  EXPECT_EQ(loss->calls.item<int>(), 4) << "the comparison leaves its buffers";
  struct OtherLoss : nn::MSELossImpl {  // not the mean that its options promise
    Tensor forward(const Tensor& out, const Tensor& target) { return sum_loss(out, target); }
  };
  EXPECT_THAT([&] { pipe->step(x, y, tensor_loss(nn::ModuleHolder<OtherLoss>())); }, differs());
}

TEST_F(Step, ComparesAgainWhenTargetsComeThatALossMayIgnore) {
  const auto masked = [](const Tensor& out, const Tensor& target) {
    return out.index({((target > 0) & (target < 9)).all(1)}).square().mean();  // not NaN
  };
  const auto within = [](const Tensor& out, const Tensor& target) {
    return out.index({(target.abs() < 9).all(1)}).square().mean();
  };
  const auto weighted = [](const Tensor& out, const Tensor& weight) {
    return (out.square().mean(1) * weight.mean(1)).sum() / weight.mean(1).sum();
  };
  const auto expect_compared = [&](auto loss, const Tensor& first, double later, const std::vector<int>& samples) {
    const auto function = tensor_loss(loss);
    pipe->step(x, first, function);
    const auto other = first.index_fill(0, torch::tensor(samples), later);
    EXPECT_THAT([&] { pipe->step(x, other, function); }, differs()) << later;
  };
  for (const double ignored : {0.0, -1.0, std::nan(""), 9.0})
    expect_compared(masked, torch::ones_like(y), ignored, {0});
  for (const double sign : {1, -1}) expect_compared(within, (1 + torch::rand_like(y)) * sign, 9 * sign, {0});
  expect_compared(weighted, torch::ones_like(y), 0.5, {0});
  for (const int padding : {0, 2, 255}) {
    const auto of_classes = [padding](const Tensor& out, const Tensor& target) {
      return torch::cross_entropy_loss(out, target, {}, at::Reduction::Mean, padding);
    };
    expect_compared(of_classes, torch::tensor({1, 3, 3, 4, 1, 4, 3}), padding, {3, 4, 5, 6});
  }
  // A part of the mini-batch has no sample that counts, so that its mean is 0 / 0.
  const auto none_first = torch::tensor({0, 0, 1, 1, 1, 1, 1}, torch::kDouble).unsqueeze(1);
  EXPECT_THAT([&] { pipe->step(x, none_first, tensor_loss(weighted)); }, refused("the micro-batches give nan"));
  pipe->step(torch::full_like(x, std::nan("")), none_first, tensor_loss(weighted));
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
  for (const auto& gradient : seen) EXPECT_TRUE(is_equal_to_one_of(gradient, sums));
  // compute_loss() hands them out.
  seen.clear();
  take_gradients(*model);
  const auto loss = pipe->compute_loss(x, y, kMse);
  const auto fourfold = torch::autograd::grad({loss * 4}, model->parameters(), {}, /*retain_graph=*/true);
  EXPECT_TRUE(same(take_gradients(*model), std::vector<Tensor>(6)));
  for (const auto& gradient : fourfold) EXPECT_TRUE(is_equal_to_one_of(gradient / 4, sums));
  loss.backward();
  EXPECT_TRUE(same(take_gradients(*model), sums));
  EXPECT_EQ(seen.size(), 2 * sums.size()) << "hooks run in both";
  EXPECT_THROW(loss.backward(), c10::Error);
}

// It runs within a recompute, and may write to a buffer of the model.
TEST_F(Step, CallsTheLossOncePerMicroBatch) {
  const auto marks = torch::zeros({});
  model->ptr(4)->register_buffer("marks", marks);
  const auto loss = tensor_loss([&](const Tensor& out, const Tensor& target) {
    EXPECT_FALSE(is_recomputing());
    Tensor(marks).add_(1);
    return torch::mse_loss(out, target);
  });
  for (const auto* schedule : {"gpipe", "1f1b", "zb_h2", "interleaved_zb"}) {
    for (const auto checkpoint : kModes) {
      const int per_worker = std::string_view(schedule).starts_with("interleaved") ? 2 : 1;
      GPipe by_schedule(model, {2, 1, 1, 1}, options(schedule).stages_per_worker(per_worker).checkpoint(checkpoint));
      marks.zero_();
      by_schedule->step(x, y, loss, StepOptions().check(false));
      EXPECT_EQ(marks.item<int>(), 4) << schedule << ", " << to_string(checkpoint);
    }
  }
}

// The last stage passes its input on, so the loss writes into it.
TEST_F(Step, TheLossMayChangeTheOutputInPlace) {
  const auto in_place = tensor_loss([](const Tensor& out, const Tensor& t) { return out.sub_(t).square().mean(); });
  model->push_back(nn::Flatten());
  for (const auto checkpoint : kModes) {
    pipe = GPipe(model, {2, 3, 1}, options("1f1b").checkpoint(checkpoint));
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
  const auto mse = [](const Tensor& out, const Tensor& target) { return torch::mse_loss(out, target); };
  const auto expect_refused = [&](auto error, const Value& input, const Value& target, auto loss,
                                  StepOptions how = {}) {
    EXPECT_THAT([&] { pipe->step(input, target, tensor_loss(loss), how); }, error);
  };
  const auto return_output = [](const Tensor& out, const Tensor&) { return out; };
  const auto return_constant = [](const Tensor& out, const Tensor&) { return out.detach().sum(); };
  const auto return_nothing = [](const Tensor&, const Tensor&) { return Tensor(); };
  const auto change_target = [](const Tensor& out, Tensor target) { return torch::mse_loss(out, target.mul_(2)); };
  expect_refused(refused("return a floating-point scalar"), x, y, return_output);
  expect_refused(refused("does not depend on the model's output"), x, y, return_constant);
  expect_refused(refused("undefined"), x, y, return_nothing);
  expect_refused(throws<std::runtime_error>("changed its target in place"), x, y, change_target);
  expect_refused(refused("the target has 6 samples, but the input has 7"), x, y.slice(0, 1), mse);
  expect_refused(refused("a target requires grad"), x, y.clone().requires_grad_(), mse);
  expect_refused(refused("scale must be finite and positive"), x, y, mse, StepOptions().scale(0));
  expect_refused(refused("no samples"), x.slice(0, 0, 0), y.slice(0, 0, 0), mse);
  EXPECT_THAT([&] { pipe->step(x, y, LossFunction()); }, refused("the loss function is empty"));
  const auto evaluates = throws<std::runtime_error>("or call forward(), or evaluate() in Python");
  {
    torch::NoGradGuard no_grad;
    expect_refused(evaluates, x, y, mse);
  }
  pipe->eval();
  expect_refused(evaluates, x, y, mse);
  EXPECT_TRUE(same(take_gradients(*model), std::vector<Tensor>(6)));
}

TEST_F(Step, RunsSchedulesFromAFileOrAFunction) {
  const auto gradients_of = [&](GPipe of) {
    of->step(x, y, kMse);
    return take_gradients(*model);
  };
  GPipe named(model, {2, 1, 1, 1}, options("interleaved_1f1b").stages_per_worker(2));
  const auto expected = gradients_of(named);
  const TemporaryDirectory folder;
  const auto path = folder / "schedule.txt";
  std::ofstream(path) << to_text(named->program(4)->schedule());
  GPipe from_file(model, {2, 1, 1, 1}, options("@" + path.string()));
  EXPECT_EQ(from_file->placement(), (std::vector<int>{0, 1, 0, 1}));
  EXPECT_EQ(from_file->devices().size(), 2u);
  EXPECT_TRUE(same(gradients_of(from_file), expected));
  EXPECT_THAT([&] { from_file->step(x.slice(0, 0, 3), y.slice(0, 0, 3), kMse); },
              refused("has 4 micro-batches, but the mini-batch is cut into 3"));

  const auto by_function = [&](ScheduleFunction function) {
    return gradients_of(GPipe(model, {2, 3}, options("gpipe").schedule_function(std::move(function))));
  };
  std::vector<int> micro_batches;
  const auto calling = [&](const Layout& of) {
    micro_batches.push_back(of.micro_batches);
    return make_schedule("1f1b", of, Checkpoint::kNever);
  };
  expect_close(by_function(calling), expected, 1e-12, 1e-12);
  EXPECT_EQ(micro_batches, std::vector<int>{4});
  EXPECT_THAT([&] { by_function([](const Layout& of) { return fill(of); }); }, refused("no backward"));
  const auto with_a_gap = [](const Layout&) {
    return parse_schedule("0F0 0R0 0F1 0B0 0B1 0F2 0B2 0F3 0B3\n1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3").schedule;
  };
  EXPECT_THAT([&] { by_function(with_a_gap); }, refused("has 0F1 between 0R0 and its B"));
}

TEST_F(Step, CheckLossTellsWhetherALossDecomposes) {
  const auto out = torch::rand({7, 5}, torch::kDouble);
  const auto target = torch::rand({7, 5}, torch::kDouble);
  const auto difference = [&](const LossFunction& loss) {
    const auto checked = check_loss(loss, out, target, 4);
    return std::abs(checked.whole - checked.from_micro_batches);
  };
  const auto dice =
      tensor_loss([](const Tensor& a, const Tensor& b) { return 1 - 2 * (a * b).sum() / (a.sum() + b.sum()); });
  EXPECT_LT(difference(kMse), 1e-12);
  EXPECT_GT(difference(dice), 1e-6);
  EXPECT_THAT([&] { check_loss(kMse, out, y.slice(0, 1), 4); }, refused("the target has 6 samples"));
}

}  // namespace
}  // namespace gpipe
