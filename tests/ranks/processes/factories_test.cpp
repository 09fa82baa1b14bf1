// Over processes, a model that is given as factories is the same at any cut and number of ranks, and no rank holds it whole.

#include <gmock/gmock.h>
#include <torch/torch.h>

#include <algorithm>
#include <map>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "gpipe/rank_state.h"
#include "tests/gpipe/helpers.h"
#include "tests/gpipe/layers.h"
#include "tests/ranks/processes/job.h"

namespace gpipe {
namespace {

namespace nn = torch::nn;
using ::testing::HasSubstr;

constexpr std::int64_t kSide = 6;

/// Counts the matrices that have memory.
struct Matrices {
  Matrices() { most = std::max(most, ++count); }
  ~Matrices() { --count; }
  Matrices(const Matrices&) = delete;
  Matrices& operator=(const Matrices&) = delete;
  static inline int count = 0;
  static inline int most = 0;
};

/// A layer with a matrix, whose memory is counted.
struct CountedImpl : nn::Module {
  CountedImpl() {
    auto memory = std::make_shared<std::vector<float>>(kSide * kSide);
    auto* data = memory->data();
    const auto release = [memory = std::move(memory), live = std::make_shared<Matrices>()](void*) {};
    weight = register_parameter("weight", torch::from_blob(data, {kSide, kSide}, release));
    nn::init::xavier_normal_(weight);
  }
  Tensor forward(const Tensor& x) { return x.matmul(weight).tanh(); }
  Tensor weight;
};
TORCH_MODULE(Counted);

struct SharesImpl : nn::Module {
  explicit SharesImpl(const Tensor& of_other) : weight(register_parameter("weight", of_other)) {}
  Tensor forward(const Tensor& x) { return x.matmul(weight.t()).sin(); }
  Tensor weight;
};
TORCH_MODULE(Shares);

/// Twelve layers with skips, buffers and dropout. If `tied`, the first and the last share a matrix.
LayerFactories counted_model(bool tied) {
  const auto counted = [] { return Counted(); };
  LayerFactory first = counted;
  LayerFactory last = counted;
  if (tied) {
    const auto matrix = std::make_shared<Tensor>();
    first = [matrix] {
      Counted layer;
      *matrix = layer->weight;
      return layer;
    };
    last = [matrix] { return Shares(*matrix); };
  }
  return {first,
          {"stash", [] { return Stash("a"); }},
          counted,
          {"norm", [] { return nn::BatchNorm1d(kSide); }},
          {"dropout", [] { return nn::Dropout(0.3); }},
          counted,
          {"stash_b", [] { return Stash("b"); }},
          {"linear", [] { return Linear(kSide, kSide); }},
          {"pop", [] { return Pop("a"); }},
          counted,
          {"pop_b", [] { return Pop("b"); }},
          last};
}

struct Slicing {
  Balance balance;
  std::string schedule = "1f1b";
};
const std::vector<Slicing> kSlicings = {{{4, 4, 4}}, {{1, 10, 1}}, {{9, 1, 2}, "gpipe"}, {{1, 1, 1, 1, 7, 1}, "zb_v"}};

struct Trained {
  GPipe pipe{nullptr};
  std::map<std::string, Tensor> record;
  Snapshot whole;  // on rank 0
};

/// Makes a pipeline, notes the initial values, trains, and notes the results.
Trained train_factories(const Slicing& cut, bool tied, const std::shared_ptr<Ranks>& ranks) {
  torch::manual_seed(7);
  Trained trained;
  const auto options = GPipeOptions().chunks(3).schedule(cut.schedule).ranks(ranks);
  trained.pipe = GPipe(counted_model(tied), cut.balance, options);
  auto& pipe = trained.pipe;
  const auto note = [&](const std::string& when) {
    for (const auto& parameter : pipe->named_parameters()) {
      // A copy gets the owner's value in the next call.
      if (tied && parameter.key() == "11.weight") continue;
      trained.record[when + parameter.key()] = parameter->detach().clone();
    }
    for (const auto& buffer : pipe->named_buffers()) trained.record[when + buffer.key()] = buffer->clone();
    trained.record[when + "generator"] = generator_state();
  };
  note("made: ");
  torch::optim::Adam adam(pipe->parameters(), 0.01);
  for (int step = 0; step < 3; ++step) {
    const auto x = torch::arange(8 * kSide, torch::kFloat).reshape({8, kSide}).sin();
    adam.zero_grad();
    const auto loss = tensor_loss([](const Tensor& out, const Tensor& t) { return torch::mse_loss(out, t); });
    trained.record["loss " + std::to_string(step)] = pipe->step(x, x.cos(), loss).loss;
    adam.step();
  }
  note("trained: ");
  Snapshot mine;
  mine.model = capture_model(*pipe);
  mine.optimizer = capture_optimizer(adam, *pipe);
  trained.whole = gather(*pipe, mine);
  return trained;
}

void expect_same_values(const std::shared_ptr<Ranks>& ranks) {
  for (const bool tied : {false, true}) {
    const auto expected = train_factories({{12}}, tied, nullptr);
    for (const auto& cut : kSlicings) {
      SCOPED_TRACE(cut.schedule + ", " + std::to_string(cut.balance.size()) + " stages" + (tied ? ", tied" : ""));
      if (cut.balance.size() / (cut.schedule == "zb_v" ? 2 : 1) < static_cast<std::size_t>(ranks->size())) continue;
      // Another order of micro-batches changes bits, so that the trained values depend on the schedule.
      const auto alone = train_factories(cut, tied, nullptr);
      const auto together = train_factories(cut, tied, ranks);
      for (const auto& [name, tensor] : together.record) {
        ASSERT_EQ(alone.record.count(name), 1) << name;
        EXPECT_TRUE(same(tensor, alone.record.at(name))) << name;
        if (name.starts_with("made: ")) EXPECT_TRUE(same(tensor, expected.record.at(name))) << name;
      }
      if (ranks->rank() == 0) EXPECT_TRUE(to_bytes(together.whole) == to_bytes(alone.whole));
    }
  }
}

TEST(RanksFactories, TwoRanksTrainAsOneProcess) { expect_job(2, expect_same_values); }
TEST(RanksFactories, ThreeRanksTrainAsOneProcess) { expect_job(3, expect_same_values); }

TEST(RanksFactories, ARankHoldsItsOwnLayersAndOneMore) {
  expect_job(3, [](const std::shared_ptr<Ranks>& ranks) {
    const auto counted = [] { return Counted(); };
    for (const auto& balance : {Balance{4, 4, 4}, Balance{2, 9, 1}, Balance{1, 2, 2, 2, 2, 3}}) {
      Matrices::most = 0;
      const GPipe pipe(LayerFactories(12, counted), balance,
                       GPipeOptions().stages_per_worker(static_cast<int>(balance.size()) / 3).ranks(ranks));
      int own = 0;
      for (std::size_t s = 0; s < balance.size(); ++s) own += pipe->is_here(static_cast<int>(s)) ? balance[s] : 0;
      EXPECT_EQ(Matrices::count, own);
      EXPECT_EQ(pipe->parameters().size(), own);
      EXPECT_LE(Matrices::most, own + 1);
    }
    EXPECT_EQ(Matrices::count, 0);
  });
}

TEST(RanksFactories, AFactoryThrowsOnOneRank) {
  expect_job(3, [](const std::shared_ptr<Ranks>&) {
    for (int culprit = 0; culprit < 3; ++culprit) {
      SCOPED_TRACE("rank " + std::to_string(culprit));
      const auto ranks = new_ranks(3);  // outlives the error
      const auto throwing = [&] {
        if (ranks->rank() == culprit) throw std::runtime_error("injected");
        return Counted();
      };
      const LayerFactories model{[] { return Counted(); }, {"bad", throwing}, [] { return Counted(); }};
      const auto make = [&] { GPipe(model, Balance{1, 1, 1}, GPipeOptions().ranks(ranks)); };
      const auto cause = "rank " + std::to_string(culprit) + " cannot make layer 'bad': injected";
      if (ranks->rank() == culprit) {
        EXPECT_THAT(make, ::testing::ThrowsMessage<std::runtime_error>("injected"));
      } else {
        EXPECT_THAT(make, throws<std::runtime_error>(cause));
      }
      EXPECT_THAT(make, throws<std::runtime_error>(ranks->rank() == culprit ? "injected" : cause));
    }
    EXPECT_EQ(Matrices::count, 0);
  });
}

TEST(RanksFactories, FactoriesThatDifferAreShown) {
  expect_job(2, [](const std::shared_ptr<Ranks>& ranks) {
    const auto width = ranks->rank() == 1 ? 5 : 6;
    const LayerFactories model{[] { return Counted(); }, [=] { return Linear(6, width); }};
    EXPECT_THAT(
        [&] {
          GPipe(model, Balance{1, 1}, GPipeOptions().ranks(ranks));
        },
        throws<std::runtime_error>("the ranks differ in layer 1: rank 0 has '1', weight Float[6, 6], bias "
                                   "Float[6], but rank 1 has '1', weight Float[5, 6]"));
  });
}

}  // namespace
}  // namespace gpipe
