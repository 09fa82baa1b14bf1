#include "tests/snapshot/samples.h"

namespace gpipe {
namespace {

namespace optim = torch::optim;

TEST(Capture, CopiesTensors) {
  auto model = sample_model();
  optim::SGD optimizer(model->parameters(), optim::SGDOptions(0.1).momentum(0.9));
  train(model, optimizer);
  const auto weights = capture_model(*model);
  const auto state = capture_optimizer(optimizer, *model);
  const auto momentum = state.state.at("0.weight").at("momentum_buffer").toTensor();
  const auto weight_before = weights["0.weight"].clone();
  const auto momentum_before = momentum.clone();
  for (const bool restored : {false, true}) {
    if (restored) restore_model(*model, weights);
    if (restored) restore_optimizer(optimizer, *model, state);
    train(model, optimizer);
    EXPECT_TRUE(same_bits(weights["0.weight"], weight_before));
    EXPECT_TRUE(same_bits(momentum, momentum_before));
  }
}

using MakeOptimizer = std::function<std::unique_ptr<optim::Optimizer>(std::vector<optim::OptimizerParamGroup>)>;

template <class Optimizer, class Options>
MakeOptimizer make(Options options) {
  return [=](std::vector<optim::OptimizerParamGroup> groups) {
    groups[1].set_options(std::make_unique<Options>(options));
    static_cast<Options&>(groups[1].options()).lr(options.lr() / 2);
    return std::make_unique<Optimizer>(std::move(groups), options);
  };
}

const std::pair<const char*, MakeOptimizer> kOptimizers[] = {
    {"Adagrad", make<optim::Adagrad>(optim::AdagradOptions(0.1).lr_decay(0.1).weight_decay(0.01))},
    {"Adam", make<optim::Adam>(optim::AdamOptions(0.1).betas({0.8, 0.95}).weight_decay(0.01))},
    {"Adam with amsgrad", make<optim::Adam>(optim::AdamOptions(0.1).amsgrad(true).eps(1e-5))},
    {"AdamW", make<optim::AdamW>(optim::AdamWOptions(0.1).amsgrad(true))},
    {"RMSprop", make<optim::RMSprop>(optim::RMSpropOptions(0.01).alpha(0.9))},
    {"centered RMSprop", make<optim::RMSprop>(optim::RMSpropOptions(0.01).momentum(0.9).centered(true))},
    {"SGD", make<optim::SGD>(optim::SGDOptions(0.1))},
    {"SGD with momentum", make<optim::SGD>(optim::SGDOptions(0.1).momentum(0.9).nesterov(true).weight_decay(0.01))},
};

/// A model with an optimizer that has the parameters in reverse order, in two groups.
struct Training {
  explicit Training(const MakeOptimizer& make) {
    auto parameters = model->parameters();
    const auto middle = parameters.rbegin() + 2;
    optimizer = make({optim::OptimizerParamGroup(std::vector<torch::Tensor>(parameters.rbegin(), middle)),
                      optim::OptimizerParamGroup(std::vector<torch::Tensor>(middle, parameters.rend()))});
  }
  void run(int steps) {
    for (int i = 0; i < steps; ++i) train(model, *optimizer);
  }
  torch::nn::Sequential model = sample_model();
  std::unique_ptr<optim::Optimizer> optimizer;
};

TEST(ContinuedTraining, EqualsUninterruptedTraining) {
  const TemporaryDirectory folder;
  for (const auto& [name, make] : kOptimizers) {
    SCOPED_TRACE(name);
    torch::manual_seed(1);
    Training whole(make);
    whole.run(3);
    whole.optimizer->param_groups()[0].options().set_lr(0.003);
    Snapshot snapshot;
    snapshot.model = capture_model(*whole.model);
    snapshot.optimizer = capture_optimizer(*whole.optimizer, *whole.model);
    snapshot.random = capture_random();
    write_snapshot(folder / "latest", snapshot);
    whole.run(4);

    torch::manual_seed(2);
    Training resumed(make);
    resumed.run(1);
    const auto read = read_snapshot(folder / "latest");
    auto of_python = read.optimizer;  // counts steps in tensors
    for (auto& [parameter, fields] : of_python.state) {
      if (fields.contains("step")) fields["step"] = torch::tensor(static_cast<float>(fields["step"].toInt()));
    }
    restore_optimizer(*resumed.optimizer, *resumed.model, of_python);
    EXPECT_TRUE(same_bits(capture_optimizer(*resumed.optimizer, *resumed.model), snapshot.optimizer));
    resumed.run(1);
    restore_model(*resumed.model, read.model);
    restore_optimizer(*resumed.optimizer, *resumed.model, read.optimizer);
    restore_random(read.random);
    EXPECT_TRUE(same_bits(capture_optimizer(*resumed.optimizer, *resumed.model), snapshot.optimizer));
    resumed.run(4);
    EXPECT_TRUE(same_bits(capture_model(*resumed.model), capture_model(*whole.model)));
    EXPECT_TRUE(same_bits(capture_optimizer(*resumed.optimizer, *resumed.model),
                          capture_optimizer(*whole.optimizer, *whole.model)));
  }
}

TEST(Restore, ContinuesTheGenerator) {
  torch::manual_seed(5);
  torch::randn({3});  // normal numbers come in pairs: the generator keeps the fourth
  const auto state = capture_random();
  const auto expected = torch::randn({5});
  torch::randn({100});
  restore_random(state);
  EXPECT_TRUE(same_bits(torch::randn({5}), expected));

  const auto before = capture_random();
  for (const auto& wrong : {torch::zeros({10}, torch::kByte), torch::zeros({5056}), torch::Tensor(),
                            torch::full({before.numel()}, 255, torch::kByte)}) {
    EXPECT_NE(error_of<std::invalid_argument>([&] { restore_random(wrong); }), "");
    EXPECT_TRUE(same_bits(capture_random(), before));
  }
}

/// Changes the state of a model, which then is another one's. Returns the error of a restore, which has changed
/// nothing.
std::string refused(torch::nn::Sequential model, const std::function<void(NamedTensors&)>& change) {
  const auto before = capture_model(*model);
  NamedTensors other;
  for (const auto& item : before) other.insert(item.key(), item.value() + 1);
  change(other);
  const auto error = error_of<std::invalid_argument>([&] { restore_model(*model, other); });
  EXPECT_TRUE(same_bits(capture_model(*model), before));
  return error;
}

TEST(Restore, RefusesTheStateOfAnotherModel) {
  const std::pair<std::function<void(NamedTensors&)>, std::string> cases[] = {
      {[](auto& other) { other["3.weight"] = other["3.weight"].t(); }, "'3.weight' is Float[4, 2] in the snapshot and"},
      {[](auto& other) { other["0.bias"] = other["0.bias"].to(torch::kDouble); }, "'0.bias' is Double[4] in the"},
      {[](auto& other) { other.erase("1.running_mean"); }, "'1.running_mean' is missing in the snapshot and Float[4]"},
      {[](auto& other) { other.insert("4.weight", torch::ones({9})); }, "'4.weight' is Float[9] in the snapshot and"},
      {[](auto& other) { other["0.weight"] = torch::Tensor(); }, "'0.weight' is undefined"},
      {[](auto& other) { other["3.weight"] = other["3.weight"].to_sparse(); }, "'3.weight' is Float[2, 4] Sparse in"},
      {[](auto& other) { other["3.weight"] = other["3.weight"].to(torch::kMeta); },
       "'3.weight' is Float[2, 4] without data in the snapshot"}};
  for (const auto& [change, is] : cases) EXPECT_THAT(refused(sample_model(), change), HasSubstr(is));
}

TEST(Restore, RefusesAModelWithTensorsThatCannotBeWritten) {
  const auto refused_with = [](const at::Tensor& last) {
    auto model = sample_model();
    model->register_buffer("last", last);
    return refused(model, [](auto&) {});
  };
  const auto made_in_inference_mode = [] {
    const c10::InferenceMode mode;
    return torch::zeros({2});
  };
  const std::string last = "'last' of this model: ";
  EXPECT_THAT(refused_with(torch::zeros({1}).expand({2})), HasSubstr(last + "some of its elements share"));
  EXPECT_THAT(refused_with(made_in_inference_mode()), HasSubstr(last + "it was made in inference mode"));
}

TEST(Restore, RefusesTheStateOfAnotherOptimizer) {
  auto model = sample_model();
  optim::Adam optimizer(model->parameters(), optim::AdamOptions(0.1));
  train(model, optimizer);
  const auto before = capture_optimizer(optimizer, *model);
  using Group = OptimizerState::Group;
  const auto expect_refused = [&](const std::vector<std::string>& words,
                                  const std::function<void(OptimizerState & other, Group & group)>& change) {
    auto other = before;
    other.param_groups[0].options["lr"] = 5.0;
    change(other, other.param_groups[0]);
    const auto error = error_of<std::invalid_argument>([&] { restore_optimizer(optimizer, *model, other); });
    for (const auto& word : words) EXPECT_THAT(error, HasSubstr(word));
    EXPECT_TRUE(same_bits(capture_optimizer(optimizer, *model), before));
  };
  expect_refused({"SGD", "Adam"}, [](auto& other, auto&) { other.type = "SGD"; });
  expect_refused({"2 groups"}, [](auto& other, auto&) { other.param_groups.emplace_back(); });
  expect_refused({"lacks '0.weight'"}, [](auto&, auto& group) { group.params.erase(group.params.begin()); });
  expect_refused({"also has '9.weight'"}, [](auto&, auto& group) { group.params.push_back("9.weight"); });
  expect_refused({"'eps'"}, [](auto&, auto& group) { group.options.erase("eps"); });
  expect_refused({"'betas'"}, [](auto&, auto& group) { group.options["betas"] = 0.9; });
  expect_refused({"'max_exp_avg_sq'"}, [](auto&, auto& group) { group.options["amsgrad"] = true; });
  expect_refused({"state of a parameter"}, [](auto& other, auto&) { other.state["9.weight"] = {}; });
  expect_refused({"'exp_avg_sq'"}, [](auto& other, auto&) { other.state.at("3.weight").erase("exp_avg_sq"); });
  expect_refused({"'step'", "'3.weight'"}, [](auto& other, auto&) { other.state.at("3.weight")["step"] = 1.0; });
  for (const auto& wrong : {torch::ones({7}), torch::ones({2, 4}).to_sparse(), torch::ones({2, 4}, torch::kMeta),
                            torch::ones({2, 4}, torch::kDouble), torch::Tensor()}) {
    expect_refused({"'exp_avg'", "'3.weight'"},
                   [&](auto& other, auto&) { other.state.at("3.weight")["exp_avg"] = wrong; });
  }
}

TEST(Capture, RefusesUnsupportedOptimizers) {
  auto model = sample_model();
  optim::LBFGS unknown(model->parameters());
  EXPECT_THAT(error_of<std::invalid_argument>([&] { capture_optimizer(unknown, *model); }), HasSubstr("LBFGS"));
  EXPECT_THAT(error_of<std::invalid_argument>([&] { restore_optimizer(unknown, *model, {}); }), HasSubstr("LBFGS"));

  struct Mine : optim::SGD {
    using SGD::SGD;
  } derived(model->parameters(), optim::SGDOptions(0.1));
  EXPECT_THAT(error_of<std::invalid_argument>([&] { capture_optimizer(derived, *model); }), HasSubstr("Mine"));

  optim::SGD stranger(std::vector<torch::Tensor>{model->parameters()[0], torch::ones({2})}, optim::SGDOptions(0.1));
  EXPECT_THAT(error_of<std::invalid_argument>([&] { capture_optimizer(stranger, *model); }), HasSubstr("parameter 1"));
}

}  // namespace
}  // namespace gpipe
