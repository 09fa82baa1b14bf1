// Errors of a call: the exception, last_error(), and the state that is restored. Models, balances, options and inputs
// that a pipeline refuses.
#include <torch/csrc/autograd/forward_grad.h>

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

/// Expects the thrown object itself, its place in what() if its type allows that, and last_error() until the next call.
template <class Error>
void expect_error_and_place(bool place_in_what) {
  const auto thrown = std::make_exception_ptr(Error("injected"));
  auto plan = std::make_shared<FaultPlan>();
  GPipe pipe(Sequential(Linear(6, 6), torch::nn::Tanh(), Faulty(plan), Linear(6, 6)), {1, 3},
             in_chunks(3, Checkpoint::kAlways));
  const auto x = torch::randn({6, 6});
  const std::pair<FaultPlan::Where, std::string> places[] = {
      {FaultPlan::kForward, " (in 1F0 (stage 1, micro-batch 0, layer '2'))"},
      {FaultPlan::kRecompute, " (in 1R2 (stage 1, micro-batch 2, layer '2'))"},
      {FaultPlan::kBackward, ""}};
  for (const auto& [where, place] : places) {
    plan->arm(where, [&] { std::rethrow_exception(thrown); });
    const auto loss = where == FaultPlan::kForward ? Tensor() : pipe->forward(x).sum();
    try {
      loss.defined() ? loss.backward() : void(pipe->forward(x));
      FAIL() << "expected an error";
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), HasSubstr("injected" + (place_in_what ? place : "")));
      if (where == FaultPlan::kForward && !place_in_what) EXPECT_EQ(std::current_exception(), thrown);
    }
    if (loss.defined()) EXPECT_THROW(loss.backward(), c10::Error);
    const auto error = pipe->last_error();
    ASSERT_TRUE(error);
    EXPECT_EQ(error->action.stage, 1);
    EXPECT_EQ(error->message, "injected");
    if (where != FaultPlan::kBackward)
      EXPECT_EQ(std::pair(error->layer, error->layer_name), std::pair(2, std::string("2")));
    plan->disarm();
    pipe->forward(x).sum().backward();
    EXPECT_FALSE(pipe->last_error());
  }
}

TEST(Errors, KeepTheirTypeAndNameTheirPlaceUntilTheNextCall) {
  expect_error_and_place<OwnError>(false);
  expect_error_and_place<std::runtime_error>(true);
  expect_error_and_place<std::invalid_argument>(true);
  expect_error_and_place<std::out_of_range>(true);
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

TEST(Errors, OfTorchNameTheLayerAndThoseBetweenLayersNone) {
  GPipe pipe(Sequential(Linear(6, 6), Linear(5, 5)), {1, 1}, in_chunks(2));
  const auto x = torch::randn({4, 6});
  EXPECT_THAT([&] { pipe->forward(x); }, throws<c10::Error>("in 1F0 (stage 1, micro-batch 0, layer '1')"));
  EXPECT_EQ(pipe->last_error()->layer, 1);
  EXPECT_THROW(pipe->forward(Tensor()), std::invalid_argument);
  EXPECT_FALSE(pipe->last_error().has_value());
  const SkipFunction forgetful(Skippable::Names{.stash = {"s"}}, [](Tensor x, SkipFunctionImpl&) { return x; });
  GPipe forgetting(Sequential(forgetful, Linear(6, 6), Pop("s")), {2, 1});
  EXPECT_THROW(forgetting->forward(x), std::runtime_error);
  EXPECT_EQ(forgetting->last_error()->layer, -1);
}

TEST(Errors, RestoreABufferThatChangedItsShapeAndAParameter) {
  bool fail = true;
  const auto seen = torch::zeros({1});
  const auto grow = function_layer([&](Tensor x) {
    Tensor(seen).resize_({seen.size(0) + 1});
    TORCH_CHECK(!fail, "on purpose");
    return x * 2;
  });
  grow->register_buffer("seen", seen);
  GPipe pipe(Sequential(grow), {1}, in_chunks(2, Checkpoint::kAlways));
  EXPECT_THROW(pipe->forward(torch::randn({4, 6})), c10::Error);
  EXPECT_EQ(seen.size(0), 1);
  fail = false;
  pipe->forward(torch::randn({4, 6}).requires_grad_()).sum().backward();
  EXPECT_EQ(seen.size(0), 3) << "once per micro-batch";

  auto table = torch::nn::Embedding(torch::nn::EmbeddingOptions(4, 6).max_norm(0.5));
  const auto before = table->weight.detach().clone();
  GPipe failing(Sequential(table, Linear(5, 5)), {1, 1});
  EXPECT_THROW(failing->forward(torch::tensor({0, 1})), c10::Error);
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
  // The model has four layers.
  const std::vector<Case> cases = {
      {{5, -1}, {}, "at least one layer"},
      {{2, 3}, {}, "balance [2, 3] sums to 5, but the model has 4 layers"},
      {{}, {}, "balance is empty"},
      {{2, 2}, in_chunks(0), "chunks must be positive, but is 0"},
      {{2, 2}, GPipeOptions().split_size(-1), "split_size must be positive, or 0 for none, but is -1"},
      {{2, 2}, in_chunks(2).split_size(2), "chunks (2) and split_size (2)"},
      {{2, 2}, GPipeOptions().intraop_threads(-1), "intraop_threads must be positive"},
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
      {{2, 2}, scheduled("@/nowhere"), "cannot read the schedule '/nowhere'"}};
  int calls = 0;
  const auto factory = [&calls] {
    ++calls;
    return Linear(6, 6);
  };
  const LayerFactories factories(4, factory);
  for (const auto& it : cases) {
    EXPECT_THAT([&] { GPipe(mlp(), it.balance, it.options); }, refused(it.why)) << it.why;
    EXPECT_THAT([&] { GPipe(factories, it.balance, it.options); }, refused(it.why)) << it.why;
  }
  EXPECT_THAT([] { GPipe(Sequential(), {}); }, refused("the model has no layers"));
  const std::pair<LayerFactories, std::string> wrong[] = {
      {{}, "has no layers"},
      {{{"a", factory}, {"a", factory}}, "two layers have the name 'a'"},
      {{{"1", factory}, factory}, "two layers have the name '1'"}};
  for (const auto& it : wrong) EXPECT_THAT([&] { GPipe(it.first, {2}); }, refused(it.second));
  EXPECT_THAT([&] { LayerFactory("a.b", factory); }, refused("but is 'a.b'"));
  EXPECT_THAT([&] { LayerFactory("", factory); }, refused("but is ''"));
  EXPECT_EQ(calls, 0) << "no factory has run";
}

TEST(Factories, LayersAreChecked) {
  const auto second = [](auto factory) {
    return [=] { GPipe(LayerFactories{[] { return Linear(2, 2); }, {"it", factory}}, Balance{1, 1}); };
  };
  const auto has_no_module = refused("the factory of layer 'it' returned no module");
  EXPECT_THAT(second([] { return Linear(nullptr); }), has_no_module);
  EXPECT_THAT(second([] { return torch::nn::AnyModule(); }), has_no_module);
  EXPECT_THAT(second([] { return std::shared_ptr<torch::nn::LinearImpl>(); }), has_no_module);
  EXPECT_THAT(second([] { return std::unique_ptr<Layer>(); }), has_no_module);
  EXPECT_THAT(second([] { return Pop("a"); }), refused("layer 'it' (1) pops 'a'"));
  const Linear one(2, 2);
  const LayerFactories twice(2, [=] { return one; });
  EXPECT_THAT([&] { GPipe(twice, Balance{2}); }, refused("layers '0' and '1' are the same module"));
}

TEST(Factories, AnErrorOfAFactoryIsThrown) {
  int calls = 0;
  const auto good = [&calls] {
    ++calls;
    return Linear(2, 2);
  };
  const auto throwing = [&](LayerFactory factory) {
    return [&, factory = std::move(factory)] { GPipe(LayerFactories{good, factory, good}, Balance{2, 1}); };
  };
  EXPECT_THAT(throwing([]() -> Linear { throw std::domain_error("injected"); }), throws<std::domain_error>("injected"));
  EXPECT_EQ(calls, 1);
  EXPECT_THAT(throwing({"wrong", [] { return Linear(-1, 2); }}), throws<c10::Error>("in the factory of layer 'wrong'"));
}

TEST(Refusal, OfDevicesModelsAndInputs) {
  using Devices = std::vector<torch::Device>;
  for (const auto& devices :
       {Devices{torch::kCPU}, Devices{torch::kCPU, torch::Device("cuda:63")}, Devices{torch::kCPU, torch::kMeta}}) {
    EXPECT_THROW(GPipe(mlp(), {2, 2}, GPipeOptions().devices(devices)), std::out_of_range);
  }
  const Linear linear(6, 6);
  EXPECT_THROW(GPipe(Sequential(linear, linear), {1, 1}), std::invalid_argument);
  Sequential model(linear);
  model->register_buffer("scale", torch::ones({1}));
  EXPECT_THAT([&] { GPipe(model, {1}); }, refused("has a buffer of its own, 'scale'"));
  NestedSequential nested({{"linear", linear}});
  nested->register_parameter("weight", torch::ones({1}));
  EXPECT_THAT([&] { GPipe(nested, {1}); }, refused("has a parameter of its own, 'weight'"));
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
  const Linear linear(6, 6);
  GPipe pipe(Sequential(linear), {1});
  const auto x = torch::randn({4, 6});
  const auto tangent = torch::ones({6, 6});
  const auto has_tangent = throws<c10::NotImplementedError>("has a tangent");
  const auto level = torch::autograd::ForwardADLevel::get_next_idx();
  EXPECT_THAT(
      [&] {
        pipe->forward(at::_make_dual(x, torch::ones({4, 6}), static_cast<std::int64_t>(level)));
      },
      has_tangent);
  linear->weight.detach()._set_fw_grad(tangent, level, /*is_inplace_op=*/false);
  EXPECT_EQ(pipe->forward(x).size(0), 4) << "another tensor has a tangent";
  linear->weight._set_fw_grad(tangent, level, /*is_inplace_op=*/false);
  EXPECT_THAT([&] { pipe->forward(x); }, has_tangent);
  torch::autograd::ForwardADLevel::release_idx(level);
  EXPECT_EQ(pipe->forward(x).size(0), 4);
}

}  // namespace
}  // namespace gpipe
