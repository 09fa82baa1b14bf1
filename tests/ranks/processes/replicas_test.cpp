// Replicas train as one pipeline does on the larger mini-batch, and are equal bit by bit. The generated cases have
// replicas, too.

#include <csignal>

#include "gpipe/gradients.h"
#include "gpipe/timeline.h"
#include "tests/gpipe/instruments.h"
#include "tests/gpipe/layers.h"
#include "tests/ranks/processes/job.h"

namespace gpipe {
namespace {

using MakeModel = std::function<Sequential()>;

Tensor inputs(std::int64_t samples) { return torch::arange(samples * 6, torch::kDouble).reshape({samples, 6}).sin(); }
Tensor targets(std::int64_t samples) { return inputs(samples).cos() * 2; }

Sequential in_double(Sequential model) {
  model->to(torch::kDouble);
  return model;
}

/// No random numbers, and no layer that joins samples.
Sequential plain_model() {
  return in_double(
      Sequential(Linear(6, 6), Stash("a"), Linear(6, 8), torch::nn::Tanh(), Linear(8, 6), Pop("a"), Linear(6, 6)));
}

Sequential noisy_model() {
  return in_double(Sequential(Linear(6, 6), Stash("a"), torch::nn::BatchNorm1d(6), torch::nn::Dropout(0.3),
                              Linear(6, 6), Pop("a"), torch::nn::BatchNorm1d(6), torch::nn::Dropout(0.2)));
}

/// The values and gradients of a pipeline.
Record record_of(const GPipe& pipe) {
  auto record = gradients_of(pipe);
  for (const auto& parameter : pipe->named_parameters()) record["value of " + parameter.key()] = *parameter;
  for (const auto& buffer : pipe->named_buffers()) record["value of " + buffer.key()] = *buffer;
  return record;
}

void expect_equal_replicas(const std::shared_ptr<Ranks>& ranks, GPipe& pipe) {
  std::string bits;
  for (const auto& [name, tensor] : record_of(pipe)) {
    const auto values = tensor.defined() ? tensor.detach().contiguous() : Tensor();
    bits += name;
    if (tensor.defined()) bits.append(static_cast<const char*>(values.const_data_ptr()), values.nbytes());
  }
  const auto all = pipe->team().gather(bits, "bits");
  for (std::size_t r = 0; r < all.size(); ++r) {
    const auto& mesh = ranks->mesh();
    EXPECT_EQ(all[r], all[mesh.rank_at(mesh.position_of(static_cast<int>(r)), 0)]) << "rank " << r;
  }
}

void expect_near(const Tensor& actual, const Tensor& expected, const std::string& what) {
  SCOPED_TRACE(what);
  expect_close({actual}, {expected}, 1e-10, 1e-12);
}

/// A pipeline over the ranks, whose initial values differ from replica to replica, and one in this process that has the
/// first one's and as many micro-batches as all replicas together.
struct Pair {
  Pair(std::shared_ptr<Ranks> of, const MakeModel& model, const Balance& balance, GPipeOptions options)
      : ranks(std::move(of)) {
    torch::manual_seed(3 + ranks->replica());
    over = GPipe(model(), balance, GPipeOptions(options).ranks(ranks));
    torch::manual_seed(3);
    alone = GPipe(model(), balance, options.chunks(options.chunks() * ranks->replicas()));
  }

  Tensor own(const Tensor& whole) const {
    const auto [begin, end] = ranks->part(whole.size(0));
    return whole.slice(0, begin, end);
  }

  /// Expects that both have the same, and that the replicas have the same bits.
  void expect_equal() {
    const auto expected = record_of(alone);
    for (const auto& [name, tensor] : record_of(over)) expect_near(tensor, expected.at(name), name);
    expect_equal_replicas(ranks, over);
  }

  void step(std::int64_t samples, const LossFunction& loss = kMse, StepOptions options = {}) {
    torch::manual_seed(seed);
    const auto expected = alone->step(inputs(samples), targets(samples), loss, options);
    torch::manual_seed(seed + (ranks->rank() == 0 ? 0 : 50));  // the first rank's counts
    const auto result = over->step(own(inputs(samples)), own(targets(samples)), loss, options.return_output(true));
    expect_near(result.loss, expected.loss, "loss");
    EXPECT_EQ(result.output.tensor().size(0), own(inputs(samples)).size(0));
    expect_equal();
    ++seed;
  }

  void forward(std::int64_t samples) {
    torch::manual_seed(++seed);
    const auto outputs = alone->forward(inputs(samples));
    torch::mse_loss(outputs, targets(samples)).backward();
    torch::manual_seed(seed);
    const auto of_part = over->forward(own(inputs(samples)));
    expect_near(of_part, own(outputs), "output");
    torch::mse_loss(of_part, own(targets(samples))).backward();
    expect_equal();
  }

  std::shared_ptr<Ranks> ranks;
  int seed = 8;
  GPipe over{nullptr};
  GPipe alone{nullptr};
};

RANKS_TEST(RanksReplicas, DeferBatchNormAndMayHaveNoSamples, 4, {.ranks = patient().replicas(2).share_outputs(true)}) {
  EXPECT_EQ(ranks->replica(), ranks->rank() % 2);
  const auto options = GPipeOptions().chunks(2).deferred_batch_norm(true);
  for (const std::int64_t samples : {12, 1}) {
    Pair pair(ranks, samples == 1 ? plain_model : noisy_model, {5, 3 - (samples == 1)}, options);
    pair.expect_equal();
    pair.step(samples);
    pair.forward(samples);
  }
}

RANKS_TEST(RanksReplicas, LargeAndOddParameters, 2, {.ranks = patient().replicas(2)}) {
  struct Odd : torch::nn::Module {
    Odd() {
      for (const auto type : {torch::kFloat, torch::kHalf, torch::kBFloat16, torch::kComplexDouble}) {
        register_parameter(std::string("p") + c10::toString(type), torch::ones({3}, type));
      }
    }
    Tensor forward(Tensor x) {
      for (const auto& each : named_parameters()) {
        if (each.key()[0] == 'p') x = x * torch::real(*each).to(torch::kDouble).mean();
      }
      if (x.index({0, 0}).item<double>() < 0.5) x = x * some;  // on the first replica only
      return x.matmul(transposed).matmul(strided) + frozen + empty.sum();
    }
    Tensor unused = register_parameter("unused", torch::rand({3}, torch::kDouble));
    Tensor frozen = register_parameter("frozen", torch::rand({6}, torch::kDouble), /*requires_grad=*/false);
    Tensor transposed = register_parameter("transposed", torch::rand({6, 6}, torch::kDouble).t());
    Tensor strided = register_parameter("strided", torch::rand({6, 12}, torch::kDouble).slice(1, 0, 12, 2));
    Tensor empty = register_parameter("empty", torch::rand({0, 6}, torch::kDouble));
    Tensor some = register_parameter("some", torch::rand({1}, torch::kDouble));
  };
  const auto model = [] {
    return in_double(
        Sequential(std::make_shared<Odd>(), Linear(6, 1200), torch::nn::ReLU(), Linear(1200, 1200), Linear(1200, 6)));
  };
  Pair pair(ranks, model, {5}, GPipeOptions().chunks(1));
  const auto x = torch::cat({torch::zeros({4, 6}, torch::kDouble), torch::ones({4, 6}, torch::kDouble)});
  pair.alone->step(x, targets(8), kMse);
  // What a replica does to its gradients does not reach the other one.
  for (int repeat = 0; repeat < 5; ++repeat) {
    pair.over->zero_grad();
    pair.over->step(pair.own(x), pair.own(targets(8)), kMse);
    pair.expect_equal();
    auto gradients = gradients_of(pair.over);
    EXPECT_FALSE(gradients["0.unused"].defined());
    EXPECT_TRUE(gradients["0.some"].defined());
    EXPECT_EQ(gradients["0.transposed"].strides(), gradients_of(pair.alone)["0.transposed"].strides());
    for (auto& parameter : pair.over->parameters()) {
      if (parameter.grad().defined() && repeat % 2 == ranks->replica()) parameter.mutable_grad().zero_();
    }
  }
}

/// Sums of floats, which depend on their order.
RANKS_TEST(RanksReplicas, RunsAreEqualBitByBit, 3, {.ranks = patient().replicas(3)}) {
  std::vector<Record> runs;
  for (int run = 0; run < 2; ++run) {
    torch::manual_seed(1);
    GPipe pipe(Sequential(Linear(6, 1500), torch::nn::Tanh(), Linear(1500, 1000), Linear(1000, 6)), {4},
               GPipeOptions().chunks(2).ranks(ranks));
    torch::manual_seed(2 + ranks->replica());
    for (int step = 0; step < 4; ++step) {
      const auto x = torch::rand({8, 6});
      pipe->step(x, x.sin(), kMse);  // accumulates
    }
    runs.push_back(record_of(pipe));
    expect_equal_replicas(ranks, pipe);
  }
  expect_part_of(runs[0], runs[1]);
}

/// A rank that is killed is noticed at once, one that stops at the time-out, because Gloo cannot be interrupted.
TEST(RanksReplicas, NameTheOneThatDoesNotSum) {
  struct Case {
    std::function<void()> fail;
    seconds timeout;
    std::string cause;
    int status = -SIGKILL;  // of rank 1
  };
  const std::vector<Case> cases = {
      {[] { raise(SIGKILL); }, seconds(600), "rank 1 was lost"},
      {[] { raise(SIGSTOP); }, seconds(1), "rank 0 did not get the gradients of rank 1"},
      {[] { throw std::runtime_error("out of ideas"); }, seconds(600), "rank 1 failed in 0B0", 2}};
  for (const auto& test : cases) {
    const auto body = [&](const std::shared_ptr<Ranks>& ranks) {
      const auto plan = std::make_shared<FaultPlan>();
      GPipe pipe(in_double(Sequential(Linear(6, 6), Faulty(plan), Linear(6, 6))), {3}, GPipeOptions().ranks(ranks));
      pipe->step(inputs(4), targets(4), kMse);
      struct sigaction action {};
      sigaction(SIGPIPE, nullptr, &action);
      EXPECT_EQ(action.sa_handler, SIG_DFL);  // a write to a rank that has ended must not raise it
      if (ranks->rank() == 1) plan->arm(FaultPlan::kBackward, test.fail);
      pipe->forward(inputs(4)).sum().backward();
    };
    const auto ends = run_job(2, body, {.ranks = patient().timeout(test.timeout).replicas(2)});
    EXPECT_EQ(ends[1].status, test.status) << ends[1].output;
    expect_failed(ends, 1, test.cause);
  }
}

RANKS_TEST(RanksReplicas, SumsCountsAndScales, 2, {.ranks = patient().replicas(2)}) {
  Pair pair(ranks, plain_model, {3, 4}, GPipeOptions().chunks(2));
  const auto sum = tensor_loss([](const Tensor& out, const Tensor& t) { return (out - t).square().sum(); });
  pair.step(9, sum, StepOptions().reduction(Reduction::kSum));
  pair.step(9, kMse, StepOptions().scale(4));
  const auto count = [](const Value& target) { return target.tensor().sum().abs().item<double>(); };
  pair.step(9, kMse, StepOptions().count(count).check(false));
}

RANKS_TEST(RanksReplicas, SnapshotsNormsAndTimelines, 4, {.ranks = patient().replicas(2)}) {
  Pair pair(ranks, plain_model, {3, 4}, GPipeOptions().chunks(2));
  auto timeline = std::make_shared<Timeline>();
  pair.over->trace(timeline);
  pair.step(8);
  pair.over->trace(nullptr);
  EXPECT_NEAR(clip_grad_norm_(*pair.over, 1).item<double>(), clip_grad_norm_(*pair.alone, 1).item<double>(), 1e-12);
  EXPECT_EQ(pair.over->team().largest(ranks->rank()), 3u);
  save_snapshot(job_folder() / "s", *pair.over);
  const auto all = pair.over->team().gather(*timeline);
  if (ranks->rank() != 0) return;
  const auto whole = read_weights(job_folder() / "s");
  EXPECT_EQ(whole.size(), pair.alone->named_parameters().size() + pair.alone->named_buffers().size());
  for (const auto& each : pair.alone->named_parameters()) expect_near(whole[each.key()], *each, each.key());
  EXPECT_EQ(all.workers, 4);
  std::vector<int> spans(4);
  for (const auto& span : all.spans) ++spans.at(span.worker);
  EXPECT_GT(spans[0], 0);
  EXPECT_EQ(spans[0], spans[2]);
  EXPECT_EQ(spans[1], spans[3]);
}

RANKS_TEST(RanksReplicas, RefuseWhatTheyCannotShare, 2, {.ranks = patient().replicas(2)}) {
  GPipe pipe(plain_model(), {7}, GPipeOptions().ranks(ranks));
  const auto step = [&](std::int64_t samples = 4) { pipe->step(inputs(samples), targets(samples), kMse); };
  if (ranks->rank() == 1) pipe->parameters().front().set_requires_grad(false);
  EXPECT_THAT(message_from([&] { step(); }),
              HasSubstr("rank 1 trains 7 parameters, but rank 0, with the same stages, trains 8;"));
  pipe->parameters().front().set_requires_grad(true);
  step();
  EXPECT_THAT(message_from([&] { step(0); }), HasSubstr("no samples"));
  EXPECT_THAT(message_from([&] { new_ranks(2, patient().replicas(3)); }),
              HasSubstr("the number of replicas is 3, but must divide the number of ranks, 2"));
  const auto others = new_ranks(2, patient().replicas(1 + ranks->rank()));
  const Balance balance = {3, 4};
  EXPECT_THAT(message_from([&] { GPipe(plain_model(), balance, GPipeOptions().ranks(others)); }),
              HasSubstr("the number of replicas"));

  for (const auto& [words, message] : {std::pair(torch::nn::EmbeddingOptions(5, 6).sparse(true), "sparse gradient"),
                                       {torch::nn::EmbeddingOptions(5, 6).max_norm(0.1), "wrote to a parameter"}}) {
    const auto options = GPipeOptions().ranks(new_ranks(2, patient().replicas(2))).checkpoint(Checkpoint::kNever);
    GPipe of_words(Sequential(torch::nn::Embedding(words), Linear(6, 6)), {2}, options);
    EXPECT_THAT(message_from([&] { of_words->forward(torch::arange(4)).sum().backward(); }), HasSubstr(message));
  }
}

}  // namespace
}  // namespace gpipe
