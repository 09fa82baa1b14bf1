// The state of a model over processes: parameters that ranks share, snapshots that ranks join, layers that factories
// make.

#include <algorithm>

#include "tests/gpipe/layers.h"
#include "tests/ranks/processes/job.h"

namespace gpipe {
namespace {

namespace nn = torch::nn;

// Parameters that ranks share.

/// Seven layers, of which 0 owns a matrix on the first rank, and 2 and 6 share it.
GPipe tied_pipe(const std::shared_ptr<Ranks>& ranks, Checkpoint checkpoint = Checkpoint::kNever,
                const Sequential& model = tied_model()) {
  return GPipe(model, Balance{1, 6}, GPipeOptions().chunks(4).checkpoint(checkpoint).ranks(ranks));
}

RANKS_TEST(RanksTied, TheOwnersRankFreezesTheParameter, 2) {
  const auto run = [&](const std::shared_ptr<Ranks>& over) {
    auto pipe = tied_pipe(over, Checkpoint::kAlways);
    Record record;
    for (const std::string when : {"frozen", "trained", "frozen again"}) {
      if (pipe->is_here(0)) pipe->parameters()[0].set_requires_grad(when == "trained");
      pipe->zero_grad();
      pipe->forward(words_of(8)).square().sum().backward();
      pipe->step(words_of(8), next_words(words_of(8)), kCrossEntropy);
      for (const auto& [name, gradient] : gradients_of(pipe)) {
        if (name != "2.weight" && name != "6.weight") record[when + name] = gradient;
      }
    }
    return record;
  };
  expect_part_of(run(ranks), run(nullptr));
}

RANKS_TEST(RanksTied, TheParameterCountsOnce, 2) {
  auto pipe = tied_pipe(ranks);
  const std::vector<double> numbers = ranks->rank() == 0 ? std::vector<double>{0} : std::vector<double>{1, 2, 3, 4};
  EXPECT_THAT(pipe->team().of_all_parameters(numbers), ::testing::ElementsAre(0, 1, 2, 3, 4));

  // An optimizer of the module's parameters has the copies too.
  const nn::Module& module = *pipe;
  torch::optim::SGD optimizer(distinct_parameters(module), torch::optim::SGDOptions(0.1));
  const auto mine = capture(pipe, optimizer);
  EXPECT_THAT(message_from([&] { gather(*pipe, mine); }),
              HasSubstr("the optimizer has '2.weight', which another rank trains as '0.weight'"));
  EXPECT_TRUE(pipe->ties_unchanged());
}

void double_the_matrix(const GPipe& pipe, int rank) {
  if (rank == 0) pipe->parameters()[0].detach().mul_(2);
}

RANKS_TEST(RanksTied, WrongUsesAreRefused, 2) {
  struct Case {
    std::string name;
    Body run;
    std::string on_rank_1;
    std::string on_rank_0 = "rank 1 failed";
  };
  const std::vector<Case> cases = {
      {"a graph of a former value",
       [](const auto& ranks) {
         auto pipe = tied_pipe(ranks);
         const auto loss = pipe->forward(words_of(8)).sum();
         double_the_matrix(pipe, ranks->rank());
         const torch::NoGradGuard no_grad;
         pipe->forward(words_of(8));
         loss.backward();
       },
       "modified by an inplace operation"},
      {"a change between forward and backward",
       [](const auto& ranks) {
         auto pipe = tied_pipe(ranks, Checkpoint::kAlways);
         const auto loss = pipe->forward(words_of(8)).sum();
         double_the_matrix(pipe, ranks->rank());
         loss.backward();
       },
       "a parameter was changed in place between", "a parameter was changed in place between"},
      {"a layer that writes",
       [](const auto& ranks) {
         auto model = tied_model();
         model->template at<SharerImpl>(6).function = [](const Tensor& x, Tensor weight) {
           const torch::NoGradGuard no_grad;
           weight.mul_(0.5);
           return x.clone();
         };
         tied_pipe(ranks, Checkpoint::kNever, model)->forward(words_of(8));
       },
       "wrote to a parameter that several stages share"},
      {"another type",
       [](const auto& ranks) {
         auto pipe = tied_pipe(ranks);
         if (ranks->rank() == 0) pipe->to(torch::kFloat);
         pipe->forward(words_of(8));
       },
       "is Float[11, 6] on the rank that owns it, but Double[11, 6] on this rank"}};
  for (const auto& test : cases) {
    SCOPED_TRACE(test.name);
    const auto of_case = new_ranks(2);
    EXPECT_THAT(message_from([&] { test.run(of_case); }),
                HasSubstr(ranks->rank() == 1 ? test.on_rank_1 : test.on_rank_0));
  }
}

// Snapshots that ranks join.

GPipe three_layers(const std::shared_ptr<Ranks>& ranks) {
  torch::manual_seed(3);
  return GPipe(Sequential(Linear(6, 6), Linear(6, 6), Linear(6, 6)), Balance{2, 1},
               GPipeOptions().chunks(2).ranks(ranks));
}

RANKS_TEST(RanksSnapshot, TheStateOfAnotherModelIsRefused, 2) {
  auto alone = three_layers(nullptr);
  const auto good = capture(alone, torch::optim::Adam(alone->parameters()));
  auto pipe = three_layers(ranks);
  torch::optim::Adam adam(pipe->parameters());
  const auto error_of = [&](const std::function<void(Snapshot&)>& change) {
    auto other = good;
    change(other);
    return message_from([&] { restore(pipe, adam, other); });
  };
  EXPECT_THAT(error_of([](auto& other) { other.model.insert("10.weight", torch::ones({2})); }),
              HasSubstr("'10.weight'"));
  EXPECT_THAT(error_of([](auto& other) { other.optimizer.param_groups[0].params.push_back("10.weight"); }),
              HasSubstr("'10.weight'"));
  EXPECT_THAT(error_of([](auto& other) { other.model.erase("0.weight"); }),  // each rank restores its own part
              HasSubstr(ranks->rank() == 0 ? "'0.weight' is missing" : "nothing"));
  EXPECT_EQ(error_of([](auto&) {}), "nothing");
}

RANKS_TEST(RanksSnapshot, RanksThatGatherDifferentStatesAreTold, 2) {
  const int rank = ranks->rank();
  auto pipe = three_layers(ranks);
  const auto good = capture(pipe, torch::optim::Adam(pipe->parameters()));
  struct Case {
    std::function<void(Snapshot&)> change;  // on rank 1
    std::string message;
    bool is_refused = false;  // by rank 1, of which rank 0 is told
  };
  const std::vector<Case> cases = {
      {[](auto& mine) { mine.optimizer.param_groups[0].options["lr"] = 0.02; }, "lr=0.02"},
      {[](auto& mine) { mine.optimizer.type = "AdamW"; }, "rank 1 calls gather of the state of the optimizer 'AdamW'"},
      {[](auto& mine) { mine.optimizer.param_groups.pop_back(); }, "make the same calls"},
      {[](auto& mine) { mine.model.erase("2.weight"); }, "the snapshot lacks '2.weight'", true},
      {[](auto& mine) { mine.optimizer.state["0.weight"] = {}; }, "the snapshot has '0.weight'", true}};
  for (const auto& test : cases) {
    auto mine = good;
    if (rank == 1) test.change(mine);
    const bool is_told = test.is_refused && rank == 0;
    EXPECT_THAT(message_from([&] { gather(*pipe, mine); }),
                HasSubstr((is_told ? "rank 1 refused the call: [gpipe] " : "") + test.message));
  }
  EXPECT_THAT(message_from([&] {
                if (rank == 1) pipe->team().largest(1);
                gather(*pipe, good);
              }),
              HasSubstr("rank 1 calls largest, but rank 0 calls gather of"));
  EXPECT_EQ(gather(*pipe, good).model.contains("2.weight"), rank == 0);
}

// Layers that factories make.

/// A layer with a matrix. Counts the live layers.
struct CountedImpl : nn::Module {
  CountedImpl() : weight(register_parameter("weight", torch::empty({6, 6}))) {
    nn::init::xavier_normal_(weight);
    most = std::max(most, ++count);
  }
  ~CountedImpl() override { --count; }
  Tensor forward(const Tensor& x) { return x.matmul(weight).tanh(); }
  Tensor weight;
  static inline int count = 0;
  static inline int most = 0;
};
TORCH_MODULE(Counted);

RANKS_TEST(RanksFactories, ARankHoldsItsOwnLayersAndOneMoreWithValuesOfAnyCut, 3) {
  const LayerFactories model(12, [] { return Counted(); });
  torch::manual_seed(7);
  const GPipe alone(model, Balance{12});
  for (const auto& balance : {Balance{4, 4, 4}, Balance{2, 9, 1}, Balance{1, 2, 2, 2, 2, 3}}) {
    const int before = CountedImpl::most = CountedImpl::count;
    torch::manual_seed(7);
    const GPipe pipe(model, balance,
                     GPipeOptions().stages_per_worker(static_cast<int>(balance.size()) / 3).ranks(ranks));
    int own = 0;
    for (std::size_t s = 0; s < balance.size(); ++s) own += pipe->is_here(static_cast<int>(s)) ? balance[s] : 0;
    EXPECT_EQ(CountedImpl::count - before, own);
    EXPECT_EQ(pipe->parameters().size(), own);
    EXPECT_LE(CountedImpl::most - before, own + 1);
    for (const auto& parameter : pipe->named_parameters()) {
      EXPECT_TRUE(same(*parameter, alone->named_parameters()[parameter.key()])) << parameter.key();
    }
  }
}

RANKS_TEST(RanksFactories, AFactoryThrowsOnOneRank, 3) {
  for (int culprit = 0; culprit < 3; ++culprit) {
    SCOPED_TRACE("rank " + std::to_string(culprit));
    std::shared_ptr<Ranks> of_case;  // not made on a rank that is told before it has connected
    const auto throwing = [&] {
      if (ranks->rank() == culprit) throw std::runtime_error("injected");
      return Counted();
    };
    const LayerFactories model{[] { return Counted(); }, {"bad", throwing}, [] { return Counted(); }};
    const auto make = [&] {
      if (!of_case) of_case = new_ranks(3);
      GPipe(model, Balance{1, 1, 1}, GPipeOptions().ranks(of_case));
    };
    const auto cause = "rank " + std::to_string(culprit) + " cannot make layer 'bad': injected";
    for (int repeat = 0; repeat == 0 || (repeat == 1 && of_case); ++repeat) {
      EXPECT_THAT(message_from(make), HasSubstr(ranks->rank() == culprit ? "injected" : cause));
    }
  }
  EXPECT_EQ(CountedImpl::count, 0);
}

}  // namespace
}  // namespace gpipe
