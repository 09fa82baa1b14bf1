// Errors of a call: the exception, last_error(), and the state that is restored. Models, balances, options and inputs
// that a pipeline refuses.
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "absl/functional/function_ref.h"
#include "gpipe/autograd/layer.h"
#include "gpipe/binding.h"
#include "gpipe/ranks.h"
#include "gpipe/schedules.h"
#include "tests/gpipe/instruments.h"
#include "tests/gpipe/layers.h"

namespace gpipe {
namespace {

// fault_test.cpp checks that they leave no trace.
struct OwnError : std::domain_error {
  using std::domain_error::domain_error;
};

TEST(Errors, AreTheObjectsThatLayersThrewAndNameTheirPlaceUntilTheNextCall) {
  const auto thrown = std::make_exception_ptr(OwnError("injected"));
  auto plan = std::make_shared<FaultPlan>();
  GPipe pipe(Sequential(Linear(6, 6), torch::nn::Tanh(), Faulty(plan), Linear(6, 6)), {1, 3},
             in_chunks(3, Checkpoint::kAlways));
  const auto x = torch::randn({6, 6});
  for (const auto where : {FaultPlan::kForward, FaultPlan::kRecompute, FaultPlan::kBackward}) {
    plan->arm(where, [&] { std::rethrow_exception(thrown); });
    if (where == FaultPlan::kForward) {
      try {
        pipe->forward(x);
        FAIL() << "expected an error";
      } catch (const OwnError&) {
        EXPECT_EQ(std::current_exception(), thrown);
      }
    } else {
      const auto loss = pipe->forward(x).sum();
      EXPECT_THROW(loss.backward(), OwnError);
      EXPECT_THROW(loss.backward(), c10::Error);
    }
    const auto error = pipe->last_error();
    ASSERT_TRUE(error);
    EXPECT_EQ(error->action.stage, 1);
    EXPECT_EQ(error->message, "injected");
    if (where != FaultPlan::kBackward) {
      EXPECT_EQ(error->layer, 2);
      EXPECT_EQ(error->layer_name, "2");
    }
    plan->disarm();
    pipe->forward(x).sum().backward();
    EXPECT_FALSE(pipe->last_error());
  }
}

TEST(Errors, OtherThanExceptionsBecomeRuntimeErrorsInARecompute) {
  auto plan = std::make_shared<FaultPlan>();
  GPipe pipe(Sequential(Linear(6, 6), Faulty(plan)), {1, 1}, in_chunks(2, Checkpoint::kAlways));
  const auto x = torch::randn({4, 6});
  for (int i = 0; i < 100; ++i) {  // PyTorch's engine crashes after about sixty that are not exceptions
    const auto loss = pipe->forward(x).sum();
    plan->arm(FaultPlan::kRecompute, [] { throw 7; });
    EXPECT_THROW(loss.backward(), std::runtime_error);
    EXPECT_EQ(pipe->last_error()->message, "unknown");
    plan->disarm();
  }
  EXPECT_NO_THROW(pipe->forward(x).sum().backward());
}

template <typename E>
void expect_place_in_what() {
  auto plan = std::make_shared<FaultPlan>();
  GPipe pipe(Sequential(Linear(6, 6), Faulty(plan)), {1, 1}, in_chunks(3, Checkpoint::kAlways));
  const auto x = torch::randn({6, 6});
  plan->arm(FaultPlan::kForward, [] { throw E("injected"); });
  EXPECT_THAT([&] { pipe->forward(x); }, throws<E>("injected (in 1F0 (stage 1, micro-batch 0, layer '1'))"));
  EXPECT_EQ(pipe->last_error()->message, "injected");
  plan->where = FaultPlan::kRecompute;
  const auto loss = pipe->forward(x).sum();
  EXPECT_THAT([&] { loss.backward(); }, throws<E>("injected (in 1R2 (stage 1, micro-batch 2, layer '1'))"));
}

TEST(Errors, OfTheStandardLibraryKeepTheirTypeAndGetThePlace) {
  expect_place_in_what<std::runtime_error>();
  expect_place_in_what<std::invalid_argument>();
  expect_place_in_what<std::out_of_range>();
}

TEST(Errors, OfTorchNameTheLayerUntilTheNextCall) {
  GPipe pipe(Sequential(Linear(6, 6), Linear(5, 5)), {1, 1}, in_chunks(2));
  EXPECT_THAT(
      [&] {
        pipe->forward(torch::randn({4, 6}));
      },
      throws<c10::Error>("in 1F0 (stage 1, micro-batch 0, layer '1')"));
  EXPECT_EQ(pipe->last_error()->layer, 1);
  EXPECT_THROW(pipe->forward(Tensor()), std::invalid_argument);
  EXPECT_FALSE(pipe->last_error().has_value());
}

TEST(Errors, BetweenLayersNameNoLayer) {
  const SkipFunction forgetful(Skippable::Names{.stash = {"s"}}, [](Tensor x, SkipFunctionImpl&) { return x; });
  GPipe pipe(Sequential(forgetful, Linear(6, 6), Pop("s")), {2, 1});
  EXPECT_THROW(pipe->forward(torch::randn({4, 6})), std::runtime_error);
  ASSERT_TRUE(pipe->last_error());
  EXPECT_EQ(pipe->last_error()->layer, -1);
}

TEST(Errors, OfJoiningOutputsLeaveNoTrace) {
  auto norm = torch::nn::BatchNorm1d(6);
  GPipe pipe(Sequential(norm, Functional([](Tensor x) { return x.sum(); })), {1, 1}, in_chunks(2));
  const auto x = torch::randn({4, 6});
  const auto state = generator_state();
  EXPECT_THAT([&] { pipe->forward(x); }, throws<std::runtime_error>("cannot be joined"));
  EXPECT_FALSE(pipe->last_error()) << "no action failed";
  EXPECT_EQ(norm->num_batches_tracked.item<std::int64_t>(), 0);
  EXPECT_TRUE(same(generator_state(), state));
}

TEST(Errors, RestoreABufferThatChangedItsShape) {
  struct GrowImpl : torch::nn::Module {
    Tensor forward(Tensor x) {
      seen.resize_({seen.size(0) + 1});
      TORCH_CHECK(!fail, "on purpose");
      return x * 2;
    }
    Tensor seen = register_buffer("seen", torch::zeros({1}));
    bool fail = true;
  };
  auto grow = std::make_shared<GrowImpl>();
  GPipe pipe(Sequential(grow), {1}, in_chunks(2, Checkpoint::kAlways));
  EXPECT_THROW(pipe->forward(torch::randn({4, 6})), c10::Error);
  EXPECT_EQ(grow->seen.size(0), 1);
  grow->fail = false;
  pipe->forward(torch::randn({4, 6}).requires_grad_()).sum().backward();
  EXPECT_EQ(grow->seen.size(0), 3) << "once per micro-batch";
}

TEST(Errors, UndoALayersChangeOfItsParameter) {
  torch::manual_seed(1);
  auto table = torch::nn::Embedding(torch::nn::EmbeddingOptions(4, 6).max_norm(0.5));
  GPipe pipe(Sequential(table, Linear(5, 5)), {1, 1});
  const auto before = table->weight.detach().clone();
  EXPECT_THROW(pipe->forward(torch::tensor({0, 1})), c10::Error);
  EXPECT_TRUE(torch::equal(table->weight, before));
}

// What Python's tests do not check of a binding.

TEST(LanguageBinding, ReplacesAnError) {
  Sequential model(Linear(4, 4), Linear(4, 4));
  const auto on_error = [](const ErrorInfo& info, const std::exception_ptr&) { throw std::domain_error(info.message); };
  GPipe pipe(make_layers(*model), {1, 1}, GPipeOptions(), {.on_error = on_error});
  EXPECT_THROW(pipe->forward(torch::randn({4, 5})), std::domain_error);
  EXPECT_EQ(pipe->last_error()->layer, 0);
  EXPECT_EQ(pipe->forward(torch::randn({4, 4})).size(0), 4);
}

struct StructureOfPair : Structure {
  bool equals(const Structure&) const override { return true; }
  std::string describe() const override { return "a pair"; }
};

TEST(LanguageBinding, CannotGiveObjectsToCppLayers) {
  Sequential model(Linear(4, 4), Linear(4, 4));
  const auto make_pair = [](Value input, absl::FunctionRef<void(int)> begin, CellMemo&, const auto&) {
    begin(0);
    const std::shared_ptr<const Structure> structure = std::make_shared<StructureOfPair>();
    return Value(structure, {input.tensor() * 2, input.tensor() * 3});
  };
  const auto run_second = [&](Value input, absl::FunctionRef<void(int)> begin, CellMemo&, const auto&) {
    begin(0);
    return make_layers(*model)[1]->forward(std::move(input));
  };
  GPipe pipe(make_layers(*model), {1, 1}, GPipeOptions(), {.run_layers = {make_pair, run_second}});
  EXPECT_THAT([&] { pipe->forward(Value(torch::randn({4, 4}))); }, refused("cannot take a pair"));
}

constexpr auto kHuge = std::numeric_limits<std::int64_t>::max();

TEST(Refusal, OfBalancesAndOptions) {
  struct Case {
    Balance balance;
    GPipeOptions options;
    std::string why;
  };
  const auto scheduled = [](const std::string& name) { return GPipeOptions().schedule(name); };
  const auto placed = [](std::vector<int> placement) { return GPipeOptions().placement(std::move(placement)); };
  const auto in_pairs = GPipeOptions().stages_per_worker(2);
  const std::vector<torch::Device> one(1, torch::kCPU);
  const std::vector<torch::Device> two(2, torch::kCPU);
  // The model has four layers. The first balance sums to 4 in 64 bits, the second in 32 bits.
  const std::vector<Case> cases = {
      {{kHuge, kHuge, 6}, {}, "balance [9223372036854775807, 9223372036854775807, 6] sums to more than 2147483647"},
      {{std::int64_t{1} << 32, 4}, {}, "sums to"},
      {{5, -1}, {}, "at least one layer"},
      {{4, 0}, {}, "at least one layer"},
      {{2, 3}, {}, "balance [2, 3] sums to 5, but the model has 4 layers"},
      {{2, 1}, {}, "balance [2, 1] sums to 3, but the model has 4 layers"},
      {{}, {}, "balance is empty"},
      {{2, 2}, in_chunks(0), "chunks must be positive, but is 0"},
      {{2, 2}, GPipeOptions().split_size(-1), "split_size must be positive, or 0 for none, but is -1"},
      {{2, 2}, in_chunks(2).split_size(2), "chunks (2) and split_size (2)"},
      {{2, 2}, GPipeOptions().intraop_threads(-1), "intraop_threads must be positive"},
      {{2, 2}, scheduled("1f1f"), "unknown schedule '1f1f'"},
      {{2, 1, 1}, in_pairs, "balance has 3 stages, which stages_per_worker = 2 does not divide"},
      {{1, 1, 1, 1},
       GPipeOptions(in_pairs).devices(one),
       "balance has 4 stages, which are on 2 workers, but the number of devices is 1; give one device per worker, or 2 "
       "stages"},
      {{2, 2}, placed({0}), "the placement has 1 entries"},
      {{2, 2}, placed({0, 2}), "stage 1 is placed on worker 2"},
      {{2, 2}, placed({1, 1}), "worker 0 has no stage"},
      {{2, 2},
       placed({0, 0}).devices(two),
       "balance has 2 stages, which are on 1 worker, but the number of devices is 2; give one device per worker, or 4 "
       "stages"},
      {{2, 2}, placed({0, 1}).stages_per_worker(2), "placement and stages_per_worker (2) exclude each other"},
      {{1, 1, 1, 1}, scheduled("looped_bfs").placement(v_placement(4)), "worker s mod"},
      {{1, 1, 1, 1}, scheduled("1f1b").stages_per_worker(2), "one stage per worker"},
      {{2, 2}, scheduled("@/nowhere"), "cannot read the schedule '/nowhere'"}};
  for (const auto& it : cases) EXPECT_THAT([&] { GPipe(mlp(), it.balance, it.options); }, refused(it.why)) << it.why;
  EXPECT_THAT([] { GPipe(Sequential(), {}); }, refused("the model has no layers"));
}

TEST(Refusal, OfNcclWithoutGpus) {
  const auto make = [] {
    const auto options = RanksOptions().nccl(true);
    const auto ranks = std::make_shared<Ranks>(c10::make_intrusive<c10d::HashStore>(), 0, 1, options);
    GPipe pipe(mlp(), {2, 2}, GPipeOptions().devices({torch::kCPU, torch::kCPU}).ranks(ranks));
  };
  EXPECT_THAT(make, ::testing::ThrowsMessage<std::invalid_argument>(
                        ::testing::AnyOf(::testing::HasSubstr("worker 0, of rank 0, is on cpu"),
                                         ::testing::HasSubstr("this gpipe was built without NCCL"))));
}

TEST(Refusal, OfDevices) {
  using Devices = std::vector<torch::Device>;
  for (const auto& devices :
       {Devices{torch::kCPU}, Devices{torch::kCPU, torch::Device("cuda:63")}, Devices{torch::kCPU, torch::kMeta}}) {
    EXPECT_THROW(GPipe(mlp(), {2, 2}, GPipeOptions().devices(devices)), std::out_of_range);
  }
}

TEST(Refusal, OfModels) {
  const Linear linear(6, 6);
  EXPECT_THROW(GPipe(Sequential(linear, linear), {1, 1}), std::invalid_argument);
  Sequential model(linear);
  model->register_buffer("scale", torch::ones({1}));
  EXPECT_THAT([&] { GPipe(model, {1}); }, refused("has a buffer of its own, 'scale'"));
  NestedSequential nested({{"linear", linear}});
  nested->register_parameter("weight", torch::ones({1}));
  EXPECT_THAT([&] { GPipe(nested, {1}); }, refused("has a parameter of its own, 'weight'"));
}

TEST(Refusal, OfInputsThatCannotBeCut) {
  GPipe pipe(mlp(), {2, 2}, in_chunks(2));
  for (const auto& input : {Value(Tensor()), Value(torch::tensor(1.0)), Value(std::vector<Tensor>()),
                            Value(std::vector<Tensor>{torch::zeros({4, 6}), torch::zeros({3, 6})})}) {
    EXPECT_THROW(pipe->forward(input), std::invalid_argument);
  }
}

TEST(Refusal, OfNumbersOfMicroBatches) {
  GPipe pipe(Sequential(torch::nn::Identity(), torch::nn::Identity()), {1, 1}, in_chunks(kHuge));
  EXPECT_EQ(pipe->forward(torch::ones({3, 1})).size(0), 3);
  EXPECT_THAT([&] { pipe->program(0); }, refused("must be positive, but is 0"));
  EXPECT_THAT([&] { pipe->program(std::numeric_limits<int>::max()); },
              refused("2 stages and 2147483647 micro-batches"));
  const auto samples = torch::ones({1, 1}).expand({std::int64_t{1} << 40, 1});
  EXPECT_THAT([&] { pipe->forward(samples); }, refused("1099511627776 micro-batches"));
}

TEST(Refusal, OfForwardModeDerivatives) {
  auto linear = Linear(6, 6);
  GPipe pipe(Sequential(linear), {1});
  const auto x = torch::randn({4, 6});
  const auto level = torch::autograd::ForwardADLevel::get_next_idx();
  const auto expect_refused = [&](const Tensor& input) {
    EXPECT_THAT([&] { pipe->forward(input); }, throws<c10::NotImplementedError>("has a tangent"));
  };
  EXPECT_EQ(pipe->forward(x).size(0), 4) << "no tensor has a tangent";
  expect_refused(at::_make_dual(x, torch::ones({4, 6}), static_cast<std::int64_t>(level)));
  linear->weight.detach()._set_fw_grad(torch::ones({6, 6}), level, /*is_inplace_op=*/false);
  EXPECT_EQ(pipe->forward(x).size(0), 4) << "another tensor has a tangent";
  linear->weight._set_fw_grad(torch::ones({6, 6}), level, /*is_inplace_op=*/false);
  expect_refused(x);
  torch::autograd::ForwardADLevel::release_idx(level);
  EXPECT_EQ(pipe->forward(x).size(0), 4);
}

}  // namespace
}  // namespace gpipe
