// A recompute sees the buffers and parameters of its forward, and changes none of them. Buffers that stages share. The
// generated cases have layers that write to buffers in forwards and backwards, and modes that change between the two.
#include "tests/gpipe/instruments.h"
#include "tests/gpipe/layers.h"

namespace gpipe {
namespace {

namespace nn = torch::nn;

using Write = void (*)(Tensor& table);

/// Scales by the first element of a table, to which it writes from the third micro-batch on.
struct LateTableImpl : nn::Module {
  LateTableImpl(Write write, std::int64_t width, bool frozen_parameter) : table(torch::ones({width})), write(write) {
    if (frozen_parameter) register_parameter("table", table, /*requires_grad=*/false);
    if (!frozen_parameter) register_buffer("table", table);
  }
  Tensor forward(Tensor x) {
    calls.add_(1);
    if (calls.item<float>() > 2) write(table);
    return linear(x) * table[0].clone();
  }
  Linear linear = register_module("linear", Linear(6, 6));
  Tensor table;
  const Write write;
  Tensor calls = register_buffer("calls", torch::zeros({}));
};

/// Expects the gradient of a training on four micro-batches.
void expect_gradient(const LateTableImpl& layer, const Tensor& x) {
  auto expected = torch::zeros({6});
  for (int i = 0; i < 4; ++i) expected += x.narrow(0, 2 * i, 2).sum(0) * (i < 2 ? 1 : i);
  EXPECT_TRUE(torch::allclose(layer.linear->weight.grad(), expected.expand({6, 6}), 1e-4, 1e-5));
}

const std::pair<std::string, Write> kWrites[] = {
    {"in place", [](Tensor& table) { table.add_(1); }},
    {"hidden", [](Tensor& table) { table.variable_data().add_(1); }},
    {"assigned", [](Tensor& table) { table.set_data(table + 1); }},
    {"unseen",
     [](Tensor& table) {
       table.data_ptr<float>()[0] += 1;
       table.unsafeGetTensorImpl()->bump_version();
     }},
};

constexpr std::int64_t kSmall = 6;
constexpr std::int64_t kLarge = 100000;

TEST(Recompute, ReadsTheBuffersThatItsForwardRead) {
  const auto x = torch::randn({8, 6});
  for (const auto& [name, write] : kWrites) {
    for (const std::int64_t width : {kSmall, kLarge}) {
      SCOPED_TRACE(name + " " + std::to_string(width));
      auto layer = std::make_shared<LateTableImpl>(write, width, /*frozen_parameter=*/false);
      GPipe pipe(Sequential(layer), {1}, in_chunks(4, Checkpoint::kAlways));
      if (width == kLarge) {  // it is copied from its first change on
        EXPECT_THAT(error_of([&] { pipe->forward(x).sum().backward(); }),
                    AllOf(HasSubstr("buffer of layer '0' was changed"), HasSubstr("repeat the call")));
        EXPECT_FALSE(layer->linear->weight.grad().defined());
        torch::NoGradGuard no_grad;
        layer->table.fill_(1);
        layer->calls.zero_();
      }
      pipe->forward(x).sum().backward();
      expect_gradient(*layer, x);
      EXPECT_EQ(layer->table[0].item<float>(), 3);
    }
  }
}

TEST(Recompute, IsRefusedIfALayerWritesToAParameter) {
  const auto x = torch::randn({8, 6});
  for (const auto& [name, write] : kWrites) {
    SCOPED_TRACE(name);
    const auto error = [&, &write = write](int chunks, Checkpoint checkpoint, bool step) {
      auto layer = std::make_shared<LateTableImpl>(write, kSmall, /*frozen_parameter=*/true);
      GPipe pipe(Sequential(layer), {1}, in_chunks(chunks, checkpoint));
      const auto text =
          error_of([&] { step ? void(pipe->step(x, x, kSumLoss, kOfSums)) : pipe->forward(x).sum().backward(); });
      if (text.empty()) expect_gradient(*layer, x);
      return text;
    };
    EXPECT_THAT(error(4, Checkpoint::kAlways, false), AllOf(HasSubstr("layer '0'"), HasSubstr("checkpoint='never'")));
    for (const bool step : {false, true}) {
      EXPECT_EQ(error(4, Checkpoint::kNever, step), "");
      // Only the last micro-batch, which is not recomputed, writes to the parameter.
      EXPECT_THAT(error(3, Checkpoint::kExceptLast, step), HasSubstr("between a forward and its recompute"));
    }
  }
}

TEST(Recompute, IsRefusedIfALayerDrawsFromAGeneratorOfItsOwnOrRenormalisesAnEmbedding) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(7);
  const auto table = nn::Embedding(nn::EmbeddingOptions(4, 6).max_norm(0.5));
  const auto before = table->weight.detach().clone();
  const auto refusal = [](const Sequential& model, const Tensor& x) {
    return error_of([&] { GPipe(model, {1}, in_chunks(2, Checkpoint::kAlways))->forward(x); });
  };
  const Functional draws([&](Tensor x) { return x * torch::rand({6}, generator); });
  EXPECT_THAT(refusal(Sequential(draws), torch::randn({4, 6}).requires_grad_()),
              AllOf(HasSubstr("layer '0'"), HasSubstr("generator of its own"), HasSubstr("checkpoint='never'")));
  EXPECT_THAT(refusal(Sequential(table), torch::tensor({0, 3, 3, 1})),
              AllOf(HasSubstr("layer '0'"), HasSubstr("wrote to a parameter"), HasSubstr("checkpoint='never'")));
  EXPECT_TRUE(same(table->weight, before));
}

// A layer returns its memory, to which it writes unseen by version counters.
TEST(Recompute, SendsCopiesOfMemoryOfLayers) {
  const auto x = torch::randn({8, 6});
  for (const bool is_buffer : {true, false}) {
    for (const auto checkpoint : kModes) {
      if (!is_buffer && checkpoint != Checkpoint::kNever) continue;  // refused
      const auto scratch = torch::zeros({2, 6});
      const auto first = function_layer([=](Tensor x) {
        scratch.variable_data().copy_(x);
        return scratch.view_as(x);
      });
      if (is_buffer) first->register_buffer("scratch", scratch);
      if (!is_buffer) first->register_parameter("scratch", scratch, /*requires_grad=*/false);
      Linear last(6, 6);
      GPipe pipe(Sequential(first, last), {1, 1}, in_chunks(4, checkpoint));
      EXPECT_TRUE(torch::allclose(pipe->forward(x), last->forward(x)));
    }
  }
}

TEST(Recompute, KeepsWhatItsBackwardWritesToALargeBuffer) {
  const auto x = torch::randn({8, 6});
  const auto run = [&](Checkpoint checkpoint) {
    torch::manual_seed(0);
    auto sum = torch::zeros({kLarge});
    const auto first = function_layer([=](Tensor x) mutable {
      const auto y = x * (1 + sum.narrow(0, 0, 6));
      return on_backward(y, [sum, y]() mutable { sum.add_(y.detach().abs().mean()); });
    });
    first->register_buffer("sum", sum);
    Sequential model(Linear(6, 6), first, Linear(6, 6));
    GPipe pipe(model, {2, 1}, in_chunks(4, checkpoint).intraop_threads(1));
    if (checkpoint != Checkpoint::kNever) {  // it is copied from its first change on
      EXPECT_THAT(error_of([&] { pipe->forward(x).pow(2).sum().backward(); }), HasSubstr("repeat the call"));
      sum.zero_();
    }
    for (int step = 0; step < 2; ++step) pipe->forward(x).pow(2).sum().backward();
    auto results = take_gradients(*model);
    results.push_back(sum);
    return results;
  };
  const auto expected = run(Checkpoint::kNever);
  for (const auto checkpoint : kModes) EXPECT_TRUE(same(run(checkpoint), expected)) << to_string(checkpoint);
}

// LibTorch's SGD writes through Tensor.data(), which advances no version counter.
TEST(Recompute, FailsWhenAnOptimizerStepsBeforeTheBackward) {
  for (const auto checkpoint : kModes) {
    Sequential model(Linear(6, 6), Linear(6, 6));
    GPipe pipe(model, {1, 1}, in_chunks(2, checkpoint));
    torch::optim::SGD optimizer(pipe->parameters(), 0.1);
    const auto x = torch::randn({4, 6});
    pipe->forward(x).sum().backward();
    const auto output = pipe->forward(x).sum();
    optimizer.step();
    if (checkpoint == Checkpoint::kNever) {
      output.backward();  // as the model itself
    } else {
      EXPECT_THAT([&] { output.backward(); }, throws<std::runtime_error>("step the optimizer after"));
    }
    pipe->forward(x).sum().backward();
  }
}

TEST(Recompute, FailsOnceWhenAnOutputBeginsToNeedAGradient) {
  bool on = false;
  Linear linear(6, 6);
  const auto layer = function_layer([&](Tensor x) {
    const auto y = linear(x);
    return std::make_tuple(y, on ? y * 2 : y.detach());
  });
  layer->register_module("linear", linear);
  GPipe pipe(Sequential(layer), {1}, in_chunks(2, Checkpoint::kAlways));
  const Value x(torch::randn({4, 6}));
  pipe->forward(x).tensors()[0].sum().backward();
  on = true;
  const auto out = pipe->forward(x).tensors();
  EXPECT_THAT([&] { out[0].sum().backward(); }, throws<std::runtime_error>("repeat the call"));
  linear->zero_grad();
  const auto again = pipe->forward(x).tensors();
  (again[0].sum() + again[1].sum()).backward();
  EXPECT_TRUE(torch::allclose(linear->bias.grad(), torch::full({6}, 12.0)));
}

TEST(Recompute, MustReturnAsManyTensorsAsItsForward) {
  const auto layer = function_layer([](std::vector<Tensor> in) {
    if (is_recomputing()) in.push_back(in[0] * 2);
    return in;
  });
  GPipe pipe(Sequential(layer), {1}, in_chunks(2, Checkpoint::kAlways));
  const auto loss = pipe->forward(std::vector<Tensor>{torch::randn({4, 6}).requires_grad_()})[0].sum();
  EXPECT_THAT([&] { loss.backward(); }, throws<std::runtime_error>("in its recompute"));
}

TEST(SharedBuffers, OfBatchNormAreRefusedInTraining) {
  auto norm = nn::BatchNorm1d(nn::BatchNorm1dOptions(6).affine(false));
  const Sequential model(NestedSequential{{"norm", norm}}, NestedSequential{{"norm", norm}});
  const auto x = torch::rand({4, 6});
  for (const bool deferred : {false, true}) {
    GPipe pipe(model, {1, 1}, GPipeOptions().deferred_batch_norm(deferred));
    EXPECT_THAT([&] { pipe->forward(x); }, throws<std::runtime_error>("' of stages 0 and 1"));
    pipe->eval();
    EXPECT_NO_THROW(pipe->forward(x));
    pipe->train();
  }
  EXPECT_NO_THROW(GPipe(model, {2})->forward(x));
}

/// Multiplies by a table, to which it may write.
struct PositionsImpl : nn::Module {
  explicit PositionsImpl(const Tensor& table) : table(register_buffer("table", table)) {}
  Tensor forward(Tensor x) {
    if (write != nullptr) write(table);
    return x * table;
  }
  Tensor table;
  Write write = nullptr;
};

// The second stage may have lost the buffer in the first call.
TEST(SharedBuffers, WorkUntilAStageWritesToThemAndAfterwards) {
  const auto table = torch::arange(6.0);
  const auto x = torch::ones({4, 6});
  for (const auto& [name, write] : {kWrites[0], kWrites[1]}) {
    for (const bool is_lost : {false, true}) {
      SCOPED_TRACE(name);
      const auto second = std::make_shared<PositionsImpl>(table);
      const auto outer = std::make_shared<Outer<std::shared_ptr<PositionsImpl>>>(second);
      GPipe pipe(Sequential(std::make_shared<PositionsImpl>(table), outer), {1, 1}, in_chunks(2));
      if (is_lost) outer->unregister_module("inner");
      if (name == "in place") EXPECT_TRUE(same(pipe->forward(x), table.square().expand({4, 6})));
      if (is_lost) outer->register_module("inner", second);
      second->write = write;
      EXPECT_THAT([&] { pipe->forward(x); }, throws<std::runtime_error>("table' of stages 0 and 1"));
      EXPECT_TRUE(same(table, torch::arange(6.0)));
      second->write = nullptr;
      EXPECT_TRUE(same(pipe->forward(x), table.square().expand({4, 6})));
    }
  }
}

}  // namespace
}  // namespace gpipe
