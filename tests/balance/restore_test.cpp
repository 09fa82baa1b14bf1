// RestoreModule: restores what trial runs change in a model.
#include <torch/torch.h>

#include "balance/balance.h"
#include "balance/plan_model.h"
#include "balance/trial.h"
#include "gpipe/autograd/layer.h"
#include "gpipe/tensors/byte_counter.h"
#include "tests/gpipe/helpers.h"

namespace gpipe {
namespace {

using torch::Tensor;
namespace nn = torch::nn;

constexpr std::int64_t kSize = 6;

/// Calls `change` on itself in each forward.
struct ChangesImpl : nn::Module {
  explicit ChangesImpl(std::function<void(ChangesImpl&)> change) : change(std::move(change)) {
    weight = register_parameter("weight", torch::randn({kSize}));
    buffer = register_buffer("buffer", torch::randn({kSize}));
  }
  Tensor forward(const Tensor& x) {
    ++forwards;
    {
      const torch::NoGradGuard no_grad;
      change(*this);
    }
    return x * 2;
  }
  void train(bool on) override {
    if (train_fails) throw std::runtime_error("the device has failed");
    nn::Module::train(on);
  }

  std::function<void(ChangesImpl&)> change;
  Tensor weight;
  Tensor buffer;
  int forwards = 0;
  bool train_fails = false;
};
TORCH_MODULE(Changes);

/// The state of a tensor, to compare with later.
struct Seen {
  explicit Seen(const Tensor& tensor)
      : values(tensor.detach().clone()),
        address(tensor.data_ptr()),
        version(tensor._version()),
        requires_grad(tensor.requires_grad()),
        gradient(tensor.grad()) {}

  void expect(const Tensor& tensor) const {
    EXPECT_EQ(tensor.sizes(), values.sizes());
    EXPECT_TRUE(torch::equal(tensor.detach(), values));
    EXPECT_EQ(tensor.data_ptr(), address);
    EXPECT_EQ(tensor._version(), version);
    EXPECT_EQ(tensor.requires_grad(), requires_grad);
    EXPECT_TRUE(tensor.grad().is_same(gradient));
  }

  Tensor values;
  const void* address;
  std::int64_t version;
  bool requires_grad;
  Tensor gradient;
};

using NamedChange = std::pair<const char*, std::function<void(ChangesImpl&)>>;

const NamedChange kChanges[] = {
    {"in place", [](ChangesImpl& of) { of.weight.mul_(1.5); }},
    {"past the version counter", [](ChangesImpl& of) { of.weight.variable_data().mul_(1.5); }},
    {"the sign of a zero", [](ChangesImpl& of) { of.weight[0].mul_(-1); }},
    {"other memory", [](ChangesImpl& of) { of.weight.set_data(torch::zeros({kSize})); }},
    {"other shape", [](ChangesImpl& of) { of.weight.set_data(torch::zeros({2 * kSize})); }},
    {"requires no grad", [](ChangesImpl& of) { of.weight.set_requires_grad(false); }},
    {"a gradient", [](ChangesImpl& of) { of.weight.mutable_grad() = torch::ones_like(of.weight); }},
    {"buffer in place", [](ChangesImpl& of) { of.buffer.add_(1); }},
    {"buffer's memory", [](ChangesImpl& of) { of.buffer.set_data(torch::zeros({kSize})); }},
    {"buffer's shape", [](ChangesImpl& of) { of.buffer.set_data(torch::zeros({2 * kSize})); }},
    {"without a graph only", [](ChangesImpl& of) { of.weight.mul_(of.forwards == 2 ? 3 : 1); }},
};

TEST(RestoreModule, RestoresWhatLayersChange) {
  for (const auto& [name, change] : kChanges) {
    SCOPED_TRACE(name);
    Changes layer(change);
    layer->weight.data()[0] = 0;
    nn::Sequential model(nn::Linear(kSize, kSize), layer);
    model->eval();
    model[0]->train();
    const Seen weight(layer->weight);
    const Seen buffer(layer->buffer);
    const Seen linear(model[0]->parameters()[0]);
    const auto state = generator_state();
    {
      const RestoreModule restore(*model);
      for (int forward = 0; forward < 3; ++forward) {
        const at::AutoGradMode grad_mode(forward != 1);
        auto layers = restore.wrap(make_layers(*model));
        Value value = torch::randn({2, kSize});
        model->train();
        for (auto& each : layers) value = each->forward(std::move(value));
        restore.check();
      }
    }
    EXPECT_EQ(layer->forwards, 3);
    weight.expect(layer->weight);
    buffer.expect(layer->buffer);
    linear.expect(model[0]->parameters()[0]);
    EXPECT_FALSE(model->is_training());
    EXPECT_TRUE(model[0]->is_training());
    EXPECT_FALSE(model[1]->is_training());
    EXPECT_TRUE(torch::equal(generator_state(), state));
  }
}

TEST(RestoreModule, RestoresABufferThatGrows) {
  Changes layer([](ChangesImpl& of) { of.buffer.resize_({of.buffer.size(0) + kSize}).fill_(1); });
  const auto before = layer->buffer.clone();
  {
    const RestoreModule restore(*layer);
    layer->forward(torch::ones({2, kSize}));
    layer->forward(torch::ones({2, kSize}));
  }
  EXPECT_TRUE(torch::equal(layer->buffer, before));
}

TEST(RestoreModule, GoesOnAfterAFailure) {
  Changes layer([](ChangesImpl&) {});
  nn::Sequential model(nn::Dropout(), layer, nn::Dropout());
  model->eval();
  const Seen buffer(layer->buffer);
  const auto state = generator_state();
  {
    const RestoreModule restore(*model);
    model->train();
    layer->buffer.add_(1);
    torch::rand({1});
    layer->train_fails = true;
  }
  buffer.expect(layer->buffer);
  EXPECT_FALSE(model[0]->is_training());
  EXPECT_FALSE(model[2]->is_training());
  EXPECT_TRUE(torch::equal(generator_state(), state));
}

TEST(RestoreModule, KeepsNoCopiesOfUnchangedParameters) {
  constexpr std::int64_t kLarge = 1000;
  nn::Sequential model;
  for (int i = 0; i < 4; ++i) model->push_back(nn::Linear(nn::LinearOptions(kLarge, kLarge).bias(false)));
  const auto bytes = kLarge * kLarge * 4;
  const auto counter = std::make_shared<ByteCounter>(1);
  const AllocationListener::Scope scope(counter);
  const ByteCounter::Worker worker(counter.get(), 0);
  ASSERT_TRUE(scope.installed());
  const torch::NoGradGuard no_grad;
  const RestoreModule restore(*model);
  auto layers = restore.wrap(make_layers(*model));
  const auto x = torch::ones({1, kLarge});
  for (auto& layer : layers) layer->forward(x);
  EXPECT_LT(counter->count(0).live, bytes);
}

TEST(Profiler, RefusesALayerThatChangesParametersLater) {
  Changes layer([](ChangesImpl& of) {
    if (of.forwards > 1 && !is_checkpointing() && !is_recomputing()) of.weight.mul_(2);
  });
  nn::Sequential model(nn::Linear(kSize, kSize), layer);
  const auto x = torch::randn({2, kSize});
  EXPECT_THAT(error_of([&] { profile(model, x, ProfileOptions().seconds(0).repeats(1)); }),
              HasSubstr("parameter '1.weight' was changed after its layer's first forwards"));
}

// tests/python/test_habits.py measures other models.
TEST(Profiler, EveryMeasurementRestoresTheModelAndTheSample) {
  nn::Sequential model(nn::ReLU(nn::ReLUOptions(true)), Changes([](ChangesImpl& of) { of.weight.clamp_(-0.1, 0.1); }),
                       nn::BatchNorm1d(kSize), nn::Dropout(0.1), nn::Linear(kSize, kSize));
  model->eval();
  model[3]->train();
  const auto parameters = model->parameters();
  int hooks = 0;
  for (const auto& parameter : parameters) parameter.register_hook([&](const Tensor&) { ++hooks; });
  parameters.back().mutable_grad() = torch::ones_like(parameters.back());
  const auto x = torch::randn({8, kSize});
  const auto x_before = x.clone();
  const std::vector<Seen> before(parameters.begin(), parameters.end());
  const auto buffers = copies(model->buffers());
  const auto state = generator_state();
  for (const bool fails : {false, true}) {
    auto measuring = MeasureOptions().chunks({1, 2}).profile(ProfileOptions().seconds(0).repeats(1));
    if (fails) model->push_back(nn::Functional([](Tensor) -> Tensor { throw std::runtime_error("tired"); }));
    // A layer that writes to a parameter cannot be recomputed.
    const auto measure = [&] {
      plan(model, x, {torch::kCPU, torch::kCPU}, {.checkpoint = Checkpoint::kNever}, measuring);
    };
    EXPECT_THAT(error_of(measure), HasSubstr(fails ? "tired" : ""));
    for (std::size_t i = 0; i < before.size(); ++i) before[i].expect(parameters[i]);
    EXPECT_TRUE(same(model->buffers(), buffers));
    for (std::size_t i = 0; i < 5; ++i) EXPECT_EQ(model[i]->is_training(), i == 3);
    EXPECT_TRUE(same(x, x_before));
    EXPECT_TRUE(same(generator_state(), state));
    EXPECT_EQ(hooks, 0);
  }
}

}  // namespace
}  // namespace gpipe
