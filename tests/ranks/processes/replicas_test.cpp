// Replicas train as one pipeline does on the larger mini-batch, and are equal bit by bit.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "gpipe/rank_state.h"
#include "gpipe/timeline.h"
#include "tests/gpipe/helpers.h"
#include "tests/gpipe/layers.h"
#include "tests/ranks/processes/job.h"

namespace gpipe {
namespace {

using ::testing::HasSubstr;
using torch::nn::Sequential;

using MakeModel = std::function<Sequential()>;

JobOptions with_replicas(int replicas) { return {.ranks = patient().replicas(replicas), .before = {}}; }

const LossFunction kMean = tensor_loss([](const Tensor& out, const Tensor& t) { return torch::mse_loss(out, t); });
const LossFunction kSum = tensor_loss([](const Tensor& out, const Tensor& t) { return (out - t).square().sum(); });

Tensor inputs(std::int64_t samples) { return torch::arange(samples * 6, torch::kDouble).reshape({samples, 6}).sin(); }
Tensor targets(std::int64_t samples) { return inputs(samples).cos() * 2; }

Sequential in_double(Sequential model) {
  model->to(torch::kDouble);
  return model;
}

/// No random numbers, and no layer that joins samples.
Sequential plain_model() {
  return in_double(Sequential(torch::nn::Linear(6, 6), Stash("a"), torch::nn::Linear(6, 8), torch::nn::Tanh(),
                              torch::nn::Linear(8, 6), Pop("a"), torch::nn::Linear(6, 6)));
}

Sequential noisy_model() {
  return in_double(Sequential(torch::nn::Linear(6, 6), Stash("a"), torch::nn::BatchNorm1d(6), torch::nn::Dropout(0.3),
                              torch::nn::Linear(6, 6), Pop("a"), torch::nn::BatchNorm1d(6), torch::nn::Dropout(0.2)));
}

template <class Call>
std::string error_in(Call call) {
  try {
    call();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

std::string bits_of(GPipe& pipe) {
  std::string bits;
  const auto add = [&](const Tensor& tensor) {
    if (!tensor.defined()) return bits.append("undefined");
    const auto values = tensor.detach().contiguous();
    return bits.append(static_cast<const char*>(values.const_data_ptr()), values.nbytes());
  };
  for (const auto& parameter : pipe->parameters()) add(parameter), add(parameter.grad());
  for (const auto& buffer : pipe->buffers()) add(buffer);
  return bits;
}

void expect_equal_replicas(const std::shared_ptr<Ranks>& ranks, GPipe& pipe) {
  const auto all = pipe->gather(bits_of(pipe), "bits");
  for (std::size_t r = 0; r < all.size(); ++r) {
    const auto& mesh = ranks->mesh();
    EXPECT_EQ(all[r], all[mesh.rank_at(mesh.position_of(static_cast<int>(r)), 0)]) << "rank " << r;
  }
}

void expect_close(const Tensor& actual, const Tensor& expected, const std::string& what) {
  ASSERT_EQ(actual.defined(), expected.defined()) << what;
  if (!actual.defined()) return;
  EXPECT_TRUE(torch::allclose(actual, expected, 1e-10, 1e-12)) << what << "\n" << actual << "\n" << expected;
}

void expect_close(GPipe& over, GPipe& alone, bool with_buffers) {
  const auto parameters = alone->named_parameters();
  for (const auto& each : over->named_parameters()) {
    expect_close(each.value(), parameters[each.key()], each.key());
    expect_close(each.value().grad(), parameters[each.key()].grad(), "gradient of " + each.key());
  }
  const auto buffers = alone->named_buffers();
  for (const auto& each : over->named_buffers()) {
    if (with_buffers) expect_close(each.value().to(torch::kDouble), buffers[each.key()].to(torch::kDouble), each.key());
  }
}

void descend_all(GPipe& pipe) {
  const torch::NoGradGuard no_grad;
  for (auto& parameter : pipe->parameters()) {
    if (parameter.grad().defined()) parameter.sub_(parameter.grad(), 0.1);
    parameter.mutable_grad() = Tensor();
  }
}

/// A pipeline over the ranks, whose initial values differ from replica to replica, and one in this process that has the
/// first one's and as many micro-batches as all replicas together.
struct Pair {
  Pair(const std::shared_ptr<Ranks>& ranks, const MakeModel& model, const std::vector<std::int64_t>& balance,
       GPipeOptions options) {
    torch::manual_seed(3 + ranks->replica());
    over = GPipe(model(), balance, GPipeOptions(options).ranks(ranks));
    torch::manual_seed(3);
    alone = GPipe(model(), balance, options.chunks(options.chunks() * ranks->replicas()));
  }
  GPipe over{nullptr};
  GPipe alone{nullptr};
};

/// Trains both in steps and in backwards, on mini-batches of these numbers of samples.
void compare(const std::shared_ptr<Ranks>& ranks, const MakeModel& model, const std::vector<std::int64_t>& balance,
             const GPipeOptions& options, const std::vector<std::int64_t>& batches) {
  Pair pair(ranks, model, balance, options);
  auto& [over, alone] = pair;
  expect_close(over, alone, /*with_buffers=*/true);
  int seed = 7;
  for (const auto samples : batches) {
    const auto x = inputs(samples);
    const auto y = targets(samples);
    const auto [begin, end] = ranks->part(samples);
    const auto own_x = x.slice(0, begin, end);
    const auto own_y = y.slice(0, begin, end);

    torch::manual_seed(++seed);
    const auto expected = alone->step(x, y, kMean);
    torch::manual_seed(seed + (ranks->rank() == 0 ? 0 : 50));  // the first rank's counts
    const auto result = over->step(own_x, own_y, kMean, StepOptions().return_output(true));
    expect_close(result.loss, expected.loss, "loss");
    EXPECT_EQ(result.output.tensor().size(0), end - begin);
    expect_close(over, alone, options.deferred_batch_norm());
    expect_equal_replicas(ranks, over);
    descend_all(over), descend_all(alone);

    torch::manual_seed(++seed);
    auto outputs = alone->forward(x);
    torch::mse_loss(outputs, y).backward();
    torch::manual_seed(seed);
    auto own = over->forward(own_x);
    expect_close(own, outputs.slice(0, begin, end), "output");
    torch::mse_loss(own, own_y).backward();
    expect_close(over, alone, options.deferred_batch_norm());
    expect_equal_replicas(ranks, over);
    descend_all(over), descend_all(alone);
  }
}

TEST(RanksReplicas, OneStageOnEach) {
  expect_job(
      2,
      [](const auto& ranks) {
        for (const auto checkpoint : {Checkpoint::kNever, Checkpoint::kAlways}) {
          const auto options = GPipeOptions().chunks(2).checkpoint(checkpoint);
          compare(ranks, plain_model, {7}, options, {8, 9, 3, 1});
          compare(ranks, noisy_model, {8}, GPipeOptions(options).deferred_batch_norm(true), {12, 8});
        }
      },
      with_replicas(2));
}

TEST(RanksReplicas, TwoStagesOnEach) {
  expect_job(
      4,
      [](const auto& ranks) {
        EXPECT_EQ(ranks->replica(), ranks->rank() % 2);
        for (const auto* schedule : {"gpipe", "1f1b", "zb_h1", "zb_h2"}) {
          const auto options = GPipeOptions().chunks(2).schedule(schedule).checkpoint(Checkpoint::kNever);
          compare(ranks, plain_model, {3, 4}, options, {8, 7, 1});
          compare(ranks, noisy_model, {5, 3}, GPipeOptions(options).deferred_batch_norm(true), {12});
        }
        compare(ranks, plain_model, {2, 2, 1, 2}, GPipeOptions().chunks(4).schedule("zb_v"), {16, 5});
        compare(ranks, plain_model, {2, 2, 1, 2},
                GPipeOptions().chunks(4).schedule("interleaved_1f1b").stages_per_worker(2), {16});
      },
      with_replicas(2));
}

TEST(RanksReplicas, ThreeOfSeveralStages) {
  expect_job(
      3,
      [](const auto& ranks) {
        compare(ranks, plain_model, {3, 2, 2}, GPipeOptions().chunks(2), {12, 11, 2, 1});
      },
      with_replicas(3));
}

TEST(RanksReplicas, LargeAndOddParameters) {
  expect_job(
      2,
      [](const auto& ranks) {
        torch::manual_seed(1);
        struct Odd : torch::nn::Module {
          Odd() {
            unused = register_parameter("unused", torch::rand({3}, torch::kDouble));
            frozen = register_parameter("frozen", torch::rand({6}, torch::kDouble), /*requires_grad=*/false);
            transposed = register_parameter("transposed", torch::rand({6, 6}, torch::kDouble).t());
            strided = register_parameter("strided", torch::rand({6, 12}, torch::kDouble).slice(1, 0, 12, 2));
            empty = register_parameter("empty", torch::rand({0, 6}, torch::kDouble));
            some = register_parameter("some", torch::rand({1}, torch::kDouble));
          }
          Tensor forward(Tensor x) {
            if (x.index({0, 0}).item<double>() < 0.5) x = x * some;  // on the first replica only
            return x.matmul(transposed).matmul(strided) + frozen + empty.sum();
          }
          Tensor unused, frozen, transposed, strided, empty, some;
        };
        const auto model = [] {
          return in_double(Sequential(std::make_shared<Odd>(), torch::nn::Linear(6, 1200), torch::nn::ReLU(),
                                      torch::nn::Linear(1200, 1200), torch::nn::Linear(1200, 6)));
        };
        GPipe over(model(), {5}, GPipeOptions().chunks(1).ranks(ranks));
        torch::manual_seed(1);
        GPipe alone(model(), {5}, GPipeOptions().chunks(2));
        const auto x = torch::cat({torch::zeros({4, 6}, torch::kDouble), torch::ones({4, 6}, torch::kDouble)});
        const auto [begin, end] = ranks->part(8);
        alone->step(x, targets(8), kMean);
        over->step(x.slice(0, begin, end), targets(8).slice(0, begin, end), kMean);
        expect_close(over, alone, true);
        expect_equal_replicas(ranks, over);
        EXPECT_FALSE(over->named_parameters()["0.unused"].grad().defined());
        EXPECT_TRUE(over->named_parameters()["0.some"].grad().defined());
        EXPECT_EQ(over->named_parameters()["0.transposed"].grad().strides(),
                  alone->named_parameters()["0.transposed"].grad().strides());
        // What a replica does to its gradients does not reach the other one.
        for (int repeat = 0; repeat < 5; ++repeat) {
          over->zero_grad();
          over->step(x.slice(0, begin, end), targets(8).slice(0, begin, end), kMean);
          if (repeat % 2 != ranks->replica()) {
            expect_close(over, alone, true);
            continue;
          }
          for (auto& parameter : over->parameters()) {
            if (parameter.grad().defined()) parameter.mutable_grad().zero_();
          }
        }
      },
      with_replicas(2));
}

TEST(RanksReplicas, SumsCountsAndScales) {
  expect_job(
      2,
      [](const auto& ranks) {
        Pair pair(ranks, plain_model, {3, 4}, GPipeOptions().chunks(2));
        const auto x = inputs(9);
        const auto y = targets(9);
        const auto [begin, end] = ranks->part(9);
        const auto count = [](const Value& target) { return target.tensor().sum().abs().template item<double>(); };
        for (const auto& options : {StepOptions().reduction(Reduction::kSum), StepOptions().scale(4)}) {
          const auto& loss = options.reduction() == Reduction::kSum ? kSum : kMean;
          const auto expected = pair.alone->step(x, y, loss, options);
          const auto result = pair.over->step(x.slice(0, begin, end), y.slice(0, begin, end), loss, options);
          expect_close(result.loss, expected.loss, "loss");
          expect_close(pair.over, pair.alone, true);
        }
        // The weights are those of all replicas' micro-batches.
        const auto result =
            pair.over->step(x.slice(0, begin, end), y.slice(0, begin, end), kMean, StepOptions().count(count));
        double weighted = 0;
        double total = 0;
        for (const auto& [from, to] : std::vector<std::pair<int, int>>{{0, 3}, {3, 5}, {5, 7}, {7, 9}}) {
          const torch::NoGradGuard no_grad;
          const auto of_part = y.slice(0, from, to);
          const double weight = of_part.sum().abs().template item<double>();
          weighted +=
              weight * torch::mse_loss(pair.alone->forward(x.slice(0, from, to)), of_part).template item<double>();
          total += weight;
        }
        EXPECT_NEAR(result.loss.template item<double>(), weighted / total, 1e-12);
      },
      with_replicas(2));
}

TEST(RanksReplicas, TakeTheFirstOnesBuffers) {
  expect_job(
      2,
      [](const auto& ranks) {
        const auto model = [] {
          return in_double(Sequential(torch::nn::Linear(6, 6), torch::nn::BatchNorm1d(6), torch::nn::Linear(6, 6)));
        };
        Pair pair(ranks, model, {3}, GPipeOptions().chunks(1));
        const auto [begin, end] = ranks->part(8);
        pair.over->step(inputs(8).slice(0, begin, end), targets(8).slice(0, begin, end), kMean);
        GPipe first(model(), {3}, GPipeOptions().chunks(1));
        {
          const torch::NoGradGuard no_grad;
          const auto values = pair.alone->named_parameters();
          for (auto& each : first->named_parameters()) each.value().copy_(values[each.key()]);
        }
        first->step(inputs(8).slice(0, 0, 4), targets(8).slice(0, 0, 4), kMean);
        pair.over->eval(), first->eval();
        const torch::NoGradGuard no_grad;
        const auto output = pair.over->forward(inputs(4));
        EXPECT_TRUE(same(output, first->forward(inputs(4))));
        EXPECT_TRUE(same(pair.over->named_buffers()["1.running_mean"], first->named_buffers()["1.running_mean"]));
        expect_equal_replicas(ranks, pair.over);
      },
      with_replicas(2));
}

TEST(RanksReplicas, SnapshotsNormsAndTimelines) {
  expect_job(
      4,
      [](const auto& ranks) {
        Pair pair(ranks, plain_model, {3, 4}, GPipeOptions().chunks(2));
        auto timeline = std::make_shared<Timeline>();
        pair.over->trace(timeline);
        const auto [begin, end] = ranks->part(8);
        pair.over->step(inputs(8).slice(0, begin, end), targets(8).slice(0, begin, end), kMean);
        pair.over->trace(nullptr);
        pair.alone->step(inputs(8), targets(8), kMean);

        Snapshot mine;
        mine.model = capture_model(*pair.over);
        const auto whole = gather(*pair.over, mine);
        if (ranks->rank() == 0) {
          const auto expected = capture_model(*pair.alone);
          ASSERT_EQ(whole.model.keys(), expected.keys());
          for (const auto& each : expected) expect_close(whole.model[each.key()], each.value(), each.key());
        } else {
          EXPECT_TRUE(whole.model.is_empty());
        }

        const auto norms = [](GPipe& pipe) {
          std::vector<double> all;
          for (const auto& parameter : pipe->parameters())
            all.push_back(parameter.grad().norm().template item<double>());
          return pipe->of_all_parameters(std::move(all));
        };
        const auto of_all = norms(pair.over);
        const auto expected = norms(pair.alone);
        ASSERT_EQ(of_all.size(), expected.size());
        for (std::size_t p = 0; p < expected.size(); ++p) EXPECT_NEAR(of_all[p], expected[p], 1e-12);

        const auto all = pair.over->gather(*timeline);
        if (ranks->rank() == 0) {
          std::vector<int> spans(4);
          for (const auto& span : all.spans) ++spans.at(span.worker);
          EXPECT_EQ(spans[0], spans[2]);
          EXPECT_GT(spans[0], 0);
          EXPECT_EQ(spans[1], spans[3]);
          // Arrows stay within a replica: per micro-batch the activation and the skip, and their gradients.
          const auto json = to_chrome_json(all);
          int arrows = 0;
          for (auto at = json.find("\"ph\":\"s\""); at != std::string::npos; at = json.find("\"ph\":\"s\"", at + 1)) {
            ++arrows;
          }
          EXPECT_EQ(all.workers, 4);
          EXPECT_EQ(arrows, 2 * 2 * 2 * 2);
        }
        EXPECT_EQ(pair.over->largest(ranks->rank()), 3u);
      },
      with_replicas(2));
}

TEST(RanksReplicas, RefuseWhatTheyCannotSum) {
  expect_job(
      2,
      [](const auto& ranks) {
        GPipe pipe(plain_model(), {7}, GPipeOptions().ranks(ranks));
        if (ranks->rank() == 1) pipe->parameters().front().set_requires_grad(false);
        EXPECT_THAT(error_in([&] { pipe->step(inputs(4), targets(4), kMean); }),
                    HasSubstr("rank 1 trains 7 parameters"));
        pipe->parameters().front().set_requires_grad(true);
        pipe->step(inputs(4), targets(4), kMean);
        EXPECT_THAT(error_in([&] { pipe->step(inputs(0), targets(0), kMean); }), HasSubstr("no samples"));
        EXPECT_THAT(error_in([&] {
                      ranks->rank() == 0 ? pipe->eval() : pipe->train();
                      pipe->forward(inputs(4));
                    }),
                    HasSubstr("evaluation mode"));
        pipe->train();
        pipe->step(inputs(4), targets(4), kMean);
        EXPECT_THAT(error_in([&] { new_ranks(2, patient().replicas(3)); }),
                    HasSubstr("the number of replicas is 3, but must divide the number of ranks, 2"));
        const auto others = new_ranks(2, patient().replicas(1 + ranks->rank()));
        EXPECT_THAT(error_in([&] {
                      GPipe(plain_model(), {3, 4}, GPipeOptions().ranks(others));
                    }),
                    HasSubstr("the number of replicas"));
      },
      with_replicas(2));
}

TEST(RanksReplicas, RefuseSparseGradients) {
  const auto ends = run_job(
      2,
      [](const auto& ranks) {
        GPipe pipe(
            Sequential(torch::nn::Embedding(torch::nn::EmbeddingOptions(5, 6).sparse(true)), torch::nn::Linear(6, 6)),
            {2}, GPipeOptions().ranks(ranks));
        EXPECT_THAT(error_in([&] { pipe->forward(torch::arange(4)).sum().backward(); }), HasSubstr("sparse gradient"));
      },
      with_replicas(2));
  for (const auto& end : ends) EXPECT_EQ(end.status, 0) << end.output;
}

/// A layer that fails in the backward of one rank.
struct Failing : torch::autograd::Function<Failing> {
  static Tensor forward(torch::autograd::AutogradContext*, Tensor x) { return x.clone(); }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*, torch::autograd::variable_list) {
    throw std::runtime_error("out of ideas");
  }
};

TEST(RanksReplicas, RefuseOtherParameters) {
  expect_job(
      4,
      [](const auto& ranks) {
        Pair pair(ranks, plain_model, {3, 4}, GPipeOptions().chunks(2));
        const auto step = [&] { pair.over->step(inputs(4), targets(4), kMean); };
        step();
        if (ranks->rank() == 3) {  // as if it had loaded another snapshot
          const torch::NoGradGuard no_grad;
          pair.over->parameters()[1].add_(1);
        }
        EXPECT_THAT(error_in(step), HasSubstr("rank 3 trains 4 parameters"));
        EXPECT_THAT(error_in(step), HasSubstr("but rank 2, with the same stages, trains 4 parameters"));
      },
      with_replicas(2));
}

TEST(RanksReplicas, NameTheFirstFailure) {
  expect_job(
      4,
      [](const auto& ranks) {
        const bool fails = ranks->rank() == 1;
        auto model = in_double(Sequential(
            Linear(6, 6), function_layer([=](Tensor x) { return fails ? Failing::apply(x) : x * 1; }), Linear(6, 6)));
        GPipe pipe(model, {2, 1}, GPipeOptions().chunks(2).ranks(ranks));
        const auto error = error_in([&] {
          // Ranks that have all gradients they wait for learn of it in their next call.
          for (int step = 0; step < 2; ++step) pipe->step(inputs(8), targets(8), kMean);
        });
        EXPECT_THAT(error, HasSubstr("out of ideas"));
        if (ranks->rank() != 1) EXPECT_THAT(error, HasSubstr("rank 1 failed in 0B"));
      },
      with_replicas(2));
}

}  // namespace
}  // namespace gpipe
