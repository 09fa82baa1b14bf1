#include "tests/snapshot/samples.h"

#include "gpipe/snapshot/folder.h"

namespace gpipe {
namespace {

namespace optim = torch::optim;

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
  explicit Training(const MakeOptimizer& make = kOptimizers[3].second) {
    auto parameters = model->parameters();
    const auto middle = parameters.rbegin() + 2;
    optimizer = make({optim::OptimizerParamGroup(std::vector<torch::Tensor>(parameters.rbegin(), middle)),
                      optim::OptimizerParamGroup(std::vector<torch::Tensor>(middle, parameters.rend()))});
  }
  void run(int steps) {
    for (int i = 0; i < steps; ++i) train(model, *optimizer);
  }
  /// The manifest of a snapshot, without what a save changes.
  nlohmann::json saved() const {
    const TemporaryDirectory folder;
    save_snapshot(folder / "s", *model, optimizer.get());
    auto manifest = SnapshotReader(folder / "s").manifest();
    for (const auto* key : {"files", "crc32", "random"}) manifest.erase(key);
    for (auto& group : manifest["optimizer"]["param_groups"]) std::sort(group["params"].begin(), group["params"].end());
    return manifest;
  }

  torch::nn::Sequential model = sample_model();
  std::unique_ptr<optim::Optimizer> optimizer;
};

TEST(Snapshot, ContinuedTrainingEqualsUninterruptedTraining) {
  const TemporaryDirectory folder;
  for (const auto& [name, make] : kOptimizers) {
    SCOPED_TRACE(name);
    torch::manual_seed(1);
    Training whole(make);
    whole.run(3);
    whole.optimizer->param_groups()[0].options().set_lr(0.003);
    save_snapshot(folder / "latest", *whole.model, whole.optimizer.get(), {.step = 3, .extra = R"({"epoch": [7]})"});
    whole.run(4);
    const auto next = torch::rand(3);

    torch::manual_seed(2);
    Training resumed(make);
    resumed.run(2);
    const auto progress = load_snapshot(folder / "latest", *resumed.model, resumed.optimizer.get());
    EXPECT_EQ(progress.step, 3);
    EXPECT_EQ(progress.extra, R"({"epoch":[7]})");
    resumed.run(4);
    EXPECT_TRUE(same_bits(copy_of(*resumed.model), copy_of(*whole.model)));
    EXPECT_TRUE(resumed.saved() == whole.saved());
    EXPECT_TRUE(torch::equal(torch::rand(3), next));
  }
  EXPECT_EQ(read_progress(folder / "latest").step, 3);
  EXPECT_EQ(read_weights(folder / "latest").size(), sample_model()->named_parameters().size() + 3);
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder / "latest"), {}), 4);
}

/// Loads a snapshot of sample_model() into `model`, after `change` has changed its text. Returns the error of a load,
/// which has changed nothing.
std::string refused(torch::nn::Sequential model, const std::function<void(nlohmann::json&)>& change,
                    optim::Optimizer* optimizer = nullptr) {
  const TemporaryDirectory folder;
  Training saved;
  saved.run(2);
  save_snapshot(folder / "s", *saved.model, saved.optimizer.get());
  auto manifest = SnapshotReader(folder / "s").manifest();
  change(manifest);
  write_bytes(folder / "s" / kManifest, with_checksum(manifest).dump());
  const auto before = copy_of(*model);
  const auto error = error_of<std::exception>([&] { load_snapshot(folder / "s", *model, optimizer); });
  if (!error.empty()) EXPECT_TRUE(same_bits(copy_of(*model), before));
  return error;
}

TEST(SnapshotRefusals, TheStateOfAnotherModel) {
  const auto with = [](const char* name, torch::Tensor value) {
    auto model = sample_model();
    model->register_buffer(name, std::move(value));
    return model;
  };
  const auto none = [](auto&) {};
  EXPECT_EQ(refused(sample_model(), none), "");
  EXPECT_THAT(refused(with("4 weight", torch::ones({9})), none),
              HasSubstr("'4 weight' is missing in the snapshot and"));
  namespace nn = torch::nn;
  nn::Sequential other(nn::Linear(3, 4), nn::BatchNorm1d(4), nn::Dropout(),
                       nn::Linear(nn::LinearOptions(4, 3).bias(false)));
  EXPECT_THAT(refused(other, none), HasSubstr("'3.weight' is Float[2, 4] in the snapshot and Float[3, 4] in"));
  other->to(torch::kDouble);
  EXPECT_THAT(refused(other, none), HasSubstr("'0.bias' is Float[4] in the snapshot and Double[4]"));
  EXPECT_THAT(refused(nn::Sequential(nn::Linear(3, 4)), none), HasSubstr("in the snapshot and missing in this model"));
  const auto made_in_inference_mode = [] {
    const c10::InferenceMode mode;
    return torch::zeros({2});
  };
  const TemporaryDirectory folder;
  for (const auto& [last, message] : {std::pair(torch::zeros({1}).expand({2}), "some of its elements share"),
                                      std::pair(made_in_inference_mode(), "it was made in inference mode")}) {
    auto model = with("last", last);
    save_snapshot(folder / "s", *model);
    EXPECT_THAT(error_of<std::invalid_argument>([&] { load_snapshot(folder / "s", *model); }),
                HasSubstr("'last' of this model: " + std::string(message)));
  }
}

TEST(SnapshotRefusals, TheStateOfAnotherOptimizer) {
  Training training;
  training.run(1);
  const auto before = training.saved();
  const auto expect_refused =
      [&](const std::string& text,
          const std::function<void(nlohmann::json & optimizer, nlohmann::json & group)>& change) {
        EXPECT_THAT(
            refused(
                training.model, [&](auto& all) { change(all["optimizer"], all["optimizer"]["param_groups"][0]); },
                training.optimizer.get()),
            HasSubstr(text));
        EXPECT_TRUE(training.saved() == before);
      };
  expect_refused("of type \"SGD\", but this one of 'AdamW'", [](auto& all, auto&) { all["type"] = "SGD"; });
  expect_refused("has 3 groups", [](auto& all, auto& group) { all["param_groups"].push_back(group); });
  expect_refused("group 0 lacks", [](auto&, auto& group) { group["params"].erase(0); });
  expect_refused("also has '9.weight'", [](auto&, auto& group) { group["params"].push_back("9.weight"); });
  expect_refused("'eps'", [](auto&, auto& group) { group.erase("eps"); });
  expect_refused("'betas'", [](auto&, auto& group) { group["betas"] = 0.9; });
  expect_refused("'maximize' is true", [](auto&, auto& group) { group["maximize"] = true; });
  expect_refused("'amsgrad'", [](auto&, auto& group) { group["amsgrad"] = 1; });
  expect_refused("'exp_avg_sq' of '3.weight'", [](auto& all, auto&) { all["state"]["3.weight"].erase("exp_avg_sq"); });
  expect_refused("'max_exp_avg_sq'", [](auto& all, auto&) { all["state"]["3.weight"].erase("max_exp_avg_sq"); });
  expect_refused("'step' of '3.weight'", [](auto& all, auto&) { all["state"]["3.weight"]["step"] = 1.5; });
  expect_refused("'exp_avg' of '3.weight'",
                 [](auto& all, auto&) { all["state"]["3.weight"]["exp_avg"] = all["state"]["0.bias"]["exp_avg"]; });
  expect_refused("'exp_avg' of '3.weight'",
                 [](auto& all, auto&) { all["state"]["3.weight"]["exp_avg"]["of"] = "nothing"; });
  EXPECT_THAT(refused(
                  training.model, [](auto& all) { all.erase("optimizer"); }, training.optimizer.get()),
              HasSubstr("another optimizer: it has none"));
}

TEST(SnapshotRefusals, WhatCannotBeSavedLeavesTheSnapshotBefore) {
  const TemporaryDirectory folder;
  const auto model = sample_model();
  save_snapshot(folder / "s", *model, nullptr, {.step = 1});
  const auto refused = [&](const torch::nn::Module& of, const optim::Optimizer* optimizer, const std::string& extra) {
    return error_of<std::exception>([&] { save_snapshot(folder / "s", of, optimizer, {.step = 2, .extra = extra}); });
  };
  const optim::LBFGS unknown(model->parameters());
  EXPECT_THAT(refused(*model, &unknown, "1"), HasSubstr("LBFGS"));
  struct Mine : optim::SGD {
    using SGD::SGD;
  };
  const Mine derived(model->parameters(), optim::SGDOptions(0.1));
  EXPECT_THAT(refused(*model, &derived, "1"), HasSubstr("Mine"));
  const optim::SGD stranger({model->parameters()[0], torch::ones({2})}, optim::SGDOptions(0.1));
  EXPECT_THAT(refused(*model, &stranger, "1"), HasSubstr("parameter 1"));
  EXPECT_THAT(refused(*model, nullptr, "{"), HasSubstr("extra that is not JSON: {"));
  const std::pair<torch::Tensor, const char*> wrong[] = {{torch::ones({2}).to_sparse(), "layout Sparse"},
                                                         {torch::ones({2}, torch::kMeta), "on meta"}};
  for (const auto& [tensor, text] : wrong) {
    auto other = sample_model();
    other->register_buffer("last", tensor);
    EXPECT_THAT(refused(*other, nullptr, "1"), HasSubstr(text));
  }
  EXPECT_EQ(read_progress(folder / "s").step, 1);
}

}  // namespace
}  // namespace gpipe
