// The state of a model over processes: parameters that ranks share, snapshots, layers that factories
// make.

#include <algorithm>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "gpipe/model.h"
#include "gpipe/snapshot/folder.h"
#include "gpipe/snapshot/safetensors.h"
#include "tests/gpipe/layers.h"
#include "tests/ranks/processes/job.h"

namespace gpipe {
namespace {

namespace nn = torch::nn;

// Parameters that ranks share.

/// Seven layers, of which 0 owns a matrix on the first rank, and 2 and 6 share it.
GPipe tied_pipe(const std::shared_ptr<Ranks>& ranks, Checkpoint checkpoint = Checkpoint::kNever) {
  return GPipe(tied_model(), Balance{1, 6}, GPipeOptions().chunks(4).checkpoint(checkpoint).ranks(ranks));
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
  EXPECT_THAT(message_from([&] { save_snapshot(job_folder() / "s", *pipe, &optimizer); }),
              HasSubstr("of the optimizer does not belong to the model"));
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

// Snapshots of ranks.

/// Trains a model with a matrix that three layers share, a frozen parameter, and buffers.
struct Training {
  Training(const Balance& balance, const std::shared_ptr<Ranks>& ranks) {
    auto model = tied_model();
    model->push_back(nn::BatchNorm1d(kWords));
    model->at<nn::LinearImpl>(4).bias.requires_grad_(false);  // has no state in the optimizer
    model->to(torch::kDouble);
    pipe = GPipe(model, balance, in_chunks(3).ranks(ranks));
    adam = std::make_unique<torch::optim::Adam>(pipe->parameters(), torch::optim::AdamOptions(0.01).amsgrad(true));
  }
  void step() {
    adam->zero_grad();
    const auto one = pipe->forward(words_of(9)).square().sum();  // several graphs at once
    const auto two = pipe->forward(words_of(6)).sum();
    two.backward({}, /*retain_graph=*/true);
    one.backward();
    two.backward();
    pipe->step(words_of(9), next_words(words_of(9)), kCrossEntropy);
    adam->step();
  }
  GPipe pipe{nullptr};
  std::unique_ptr<torch::optim::Adam> adam;
};

/// Returns the manifest and the tensors of a snapshot, without what depends on the ranks that wrote it.
std::pair<nlohmann::json, Record> content_of(const std::filesystem::path& path) {
  SnapshotReader reader(path);
  auto manifest = reader.manifest();
  Record tensors;
  for (const auto& file : manifest["files"]) {
    for (const std::string name : file["tensors"]) tensors[name] = reader.read(name);
  }
  for (auto& group : manifest["optimizer"]["param_groups"]) std::sort(group["params"].begin(), group["params"].end());
  for (const auto* of_ranks : {"files", "crc32", "random"}) manifest.erase(of_ranks);
  return {manifest, tensors};
}

RANKS_TEST(RanksSnapshot, IsThatOfOneProcessAndATrainingGoesOnAtAnotherCut, 4) {
  const auto together = job_folder() / "together", alone = job_folder() / ("alone" + std::to_string(ranks->rank()));
  const auto expect_equal = [&](Training over, Training in_one_process) {
    for (auto* each : {&over, &in_one_process}) {
      each->step();
      each->step();
    }
    save_snapshot(together, *over.pipe, over.adam.get(), {.step = 7, .extra = R"({"batch": 2})"});
    save_snapshot(alone, *in_one_process.pipe, in_one_process.adam.get(), {.step = 7, .extra = R"({"batch": 2})"});
    if (ranks->rank() != 0) return;
    const auto [manifest, tensors] = content_of(together);
    const auto [manifest_alone, tensors_alone] = content_of(alone);
    EXPECT_EQ(manifest, manifest_alone);
    EXPECT_EQ(tensors.size(), tensors_alone.size());
    expect_part_of(tensors, tensors_alone);
  };
  expect_equal({{1, 1, 1, 5}, ranks}, {{1, 1, 1, 5}, nullptr});
  const auto resumed = [&](const std::shared_ptr<Ranks>& over) {
    Training training({2, 2, 1, 3}, over);
    EXPECT_EQ(load_snapshot(together, *training.pipe, training.adam.get()).step, 7);
    return training;
  };
  auto over = resumed(ranks), in_one_process = resumed(nullptr);
  ranks->share("");                                                           // all have loaded
  for (auto* each : {&over, &in_one_process}) each->pipe->to(torch::kFloat);  // other layouts than in earlier calls
  expect_equal(std::move(over), std::move(in_one_process));
}

RANKS_TEST(RanksSnapshot, RanksThatSaveDifferentStatesAreTold, 2) {
  const int rank = ranks->rank();
  const auto path = job_folder() / "s";
  GPipe pipe(Sequential(Linear(6, 6), Linear(6, 6)), {1, 1}, GPipeOptions().ranks(ranks));
  const torch::optim::Adam good(pipe->parameters());
  save_snapshot(path, *pipe, &good, {.step = 1});
  const torch::optim::Adam other_rate(pipe->parameters(), 0.02);
  const torch::optim::AdamW other_kind(pipe->parameters());
  const torch::optim::Adam stranger({torch::ones({2})});
  const auto other_groups = torch::optim::Adam(
      {torch::optim::OptimizerParamGroup(pipe->parameters()), torch::optim::OptimizerParamGroup({})});
  const std::pair<const torch::optim::Optimizer*, std::string> cases[] = {
      {&other_rate, "\"lr\":0.02"},
      {&other_kind, "the optimizer of rank 1 has the class and options \"AdamW\""},
      {&other_groups, "all ranks need the same"},
      {&stranger, "parameter 0 in group 0 of the optimizer does not belong to the model"}};
  for (const auto& [of_rank_1, message] : cases) {
    const auto* optimizer = rank == 1 ? of_rank_1 : &good;
    EXPECT_THAT(message_from([&] { save_snapshot(path, *pipe, optimizer, {.step = 2}); }), HasSubstr(message));
  }
  EXPECT_EQ(load_snapshot(path, *pipe).step, 1);
  save_snapshot(path, *pipe, rank == 1 ? &good : nullptr, {.step = 3 + rank});
  EXPECT_EQ(read_progress(path).step, 3);
}

RANKS_TEST(RanksModelFile, ARankReadsTheTensorsOfItsOwnLayersOnly, 2) {
  Safetensors file;
  file.tensors = {{"in.w", torch::tensor({1.0, 2.0}, torch::kDouble)},
                  {"in.b", torch::tensor({3.0, 4.0}, torch::kDouble)},
                  {"mid.w", torch::tensor({0.25, 0.5}, torch::kDouble)}};
  const auto layer = [](const char* name, const char* tensors, const char* calls, int output) {
    return absl::StrFormat(R"({"name": "%s", "evaluation": [], "tensors": [%s], "graph": {"values": 5, "inputs": [0],
      "tensors": [["%s.w", 1]], "calls": [%s], "outputs": [{"value": %d}]}})",
                           name, tensors, name, calls, output);
  };
  const auto* times = R"({"operator": "aten::mul.Tensor", "args": [{"value": 0}, {"value": 1}], "result": 2})";
  file.model = absl::StrCat(R"({"version": 1, "layers": [)",
                            layer("in", R"(["in.w", "parameter", null], ["in.b", "parameter", null])", times, 2), ",",
                            layer("mid", R"(["mid.w", "parameter", null])", times, 2), ",",
                            layer("out", R"(["out.w", "parameter", "in.w"])", times, 2), "]}");
  const auto path = job_folder() / "model", damaged = job_folder() / "damaged";
  if (ranks->rank() == 0) {
    write_safetensors(path, file);
    std::stringstream bytes;
    bytes << std::ifstream(path, std::ios::binary).rdbuf();
    auto changed = bytes.str();
    const double of_mid = 0.25;
    changed[changed.find(std::string(reinterpret_cast<const char*>(&of_mid), sizeof of_mid))] ^= 1;
    std::ofstream(damaged, std::ios::binary) << changed;
  }
  ranks->share("");
  const auto options = GPipeOptions().chunks(2).ranks(ranks);
  const auto model = load_model(path, {1, 2}, options);
  const auto is_real = [&](const char* name) { return !model->named_parameters()[name].is_meta(); };
  EXPECT_TRUE(is_real("in.in.w") && is_real("out.out.w"));  // both ranks have it
  EXPECT_EQ(is_real("in.in.b"), ranks->rank() == 0);
  EXPECT_EQ(is_real("mid.mid.w"), ranks->rank() == 1);
  const auto step = [](GPipe pipe) {
    const auto x = torch::arange(8, torch::kDouble).view({4, 2});
    pipe->step(x, x, tensor_loss(nn::MSELoss()));
    auto gradients = gradients_of(pipe);
    gradients.erase("out.out.w");  // its owner's has the sum
    return gradients;
  };
  expect_part_of(step(GPipe(model, Balance{1, 2}, options)),
                 step(GPipe(load_model(path), Balance{1, 2}, GPipeOptions().chunks(2))));
  const auto error = message_from([&] { load_model(damaged, {1, 2}, options); });
  EXPECT_THAT(error, HasSubstr(ranks->rank() == 0 ? "nothing" : "the checksum of 'mid.w' does not match"));
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
