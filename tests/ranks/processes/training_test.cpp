// Trainings over processes leave what they leave in one process, bit by bit: outputs, parameters, gradients, buffers,
// random numbers, and snapshots, from which a training goes on at another cut. Generated cases over ranks and replicas.

#include <unistd.h>

#include "gpipe/snapshot/folder.h"
#include "tests/gpipe/generated_case.h"
#include "tests/gpipe/layers.h"
#include "tests/ranks/processes/job.h"

namespace gpipe {
namespace {

namespace nn = torch::nn;
namespace optim = torch::optim;

constexpr std::int64_t kSide = 6;

/// How ten layers are cut into stages of four workers.
struct Cut {
  Balance balance;
  std::string schedule;
};
const Cut kCut = {{1, 1, 1, 1, 1, 1, 3, 1}, "zb_v"};
const Cut kOtherCut = {{3, 1, 2, 4}, "gpipe"};  // the second stage has no parameters

/// Layers of factories, with skips, random numbers, buffers, a frozen parameter, and a matrix that three share.
LayerFactories make_factories() {
  const auto matrix = std::make_shared<Tensor>();
  const auto sharer = [matrix] { return Sharer(*matrix, mix); };
  return {[matrix] {
            Linear layer(kSide, kSide);
            *matrix = layer->weight;
            return layer;
          },
          {"stash", [] { return Stash("a"); }},
          {"norm", [] { return nn::BatchNorm1d(kSide); }},
          {"dropout", [] { return nn::Dropout(0.3); }},
          sharer,
          {"stash_b", [] { return Stash("b"); }},
          {"linear",
           [] {
             Linear layer(kSide, kSide);
             layer->bias.requires_grad_(false);  // has no state in the optimizer
             return layer;
           }},
          {"pop", [] { return Pop("a"); }},
          {"pop_b", [] { return Pop("b"); }},
          sharer};
}

Tensor waves(std::int64_t samples) {
  return torch::arange(samples * kSide, torch::kFloat).reshape({samples, kSide}).sin();
}

/// A training over ranks, or in one process if `ranks` is null, and what its calls leave.
struct Training {
  Training(const Cut& cut, const std::shared_ptr<Ranks>& ranks) {
    torch::manual_seed(3);
    const auto options = in_chunks(3, Checkpoint::kAlways).schedule(cut.schedule).ranks(ranks);
    pipe = GPipe(make_factories(), cut.balance, GPipeOptions(options).deferred_batch_norm(true));
    std::vector<optim::OptimizerParamGroup> groups;
    for (const bool of_matrices : {true, false}) {
      auto chosen = pipe->parameters();
      std::erase_if(chosen, [&](const Tensor& parameter) { return (parameter.dim() > 1) != of_matrices; });
      auto options = std::make_unique<optim::AdamOptions>(0.01);
      options->amsgrad(true).weight_decay(of_matrices ? 0.1 : 0);
      groups.emplace_back(chosen, std::move(options));
    }
    adam = std::make_unique<optim::Adam>(groups, optim::AdamOptions(0.01).amsgrad(true));
    note("as made", {});
  }

  void step(std::int64_t samples) {
    const auto x = waves(samples);
    adam->zero_grad();
    const auto result = pipe->step(x, x.cos(), kMse, StepOptions().return_output(true));
    pipe->step(x, x.cos(), kMse);  // accumulates
    adam->step();
    pipe->eval();
    const torch::NoGradGuard no_grad;
    note("step of " + std::to_string(samples),
         {result.loss, result.output.tensor(), pipe->forward(waves(samples + 1))});
    pipe->train();
  }

  /// Several graphs at once, graphs that are used twice, and autograd's other entries.
  void use_graphs(bool has_input) {
    const auto x = waves(9);
    adam->zero_grad();
    const auto one = pipe->forward(x);
    const auto two = pipe->forward(waves(6));
    two.sum().backward();
    (one * one).sum().backward({}, /*retain_graph=*/true);
    note("two graphs", {one, two});
    one.cos().sum().backward();
    { const auto dropped = pipe->forward(x); }
    const auto loss = pipe->compute_loss(x, x.cos(), kMse);
    (2 * loss).backward();
    const auto output = pipe->forward(x);
    std::vector<std::string> names;
    std::vector<Tensor> trained;
    for (const auto& each : pipe->named_parameters()) {
      if (!each->requires_grad() || is_one_of(*each, trained) || !is_one_of(*each, pipe->parameters())) continue;
      names.push_back(each.key());
      trained.push_back(*each);
    }
    if (trained.empty()) {
      output.sum().backward();
    } else {
      const auto gradients = torch::autograd::grad({output.sum()}, trained, {}, false, false, /*allow_unused=*/true);
      for (std::size_t p = 0; p < trained.size(); ++p) record["grad of " + names[p]] = gradients[p];
    }
    const auto leaf = x.clone().requires_grad_();
    pipe->forward(leaf).sum().backward();
    EXPECT_EQ(leaf.grad().defined(), has_input);
    note("other entries", {loss, output});
    if (has_input) record["gradient of the input"] = leaf.grad();
  }

  /// Other layouts than in earlier calls.
  void convert() {
    pipe->to(torch::kDouble);
    const auto x = waves(9).to(torch::kDouble);
    pipe->step(x, x.cos(), kMse);
    note("in double", {});
  }

  void save(const std::filesystem::path& path) {
    save_snapshot(path, *pipe, adam.get(), {.step = 7, .extra = R"({"batch": 2})"});
  }

  void note(const std::string& call, const std::vector<Tensor>& results) {
    const auto add = [&](const std::string& name, const Tensor& tensor) {
      record[call + ": " + name] = tensor.defined() ? tensor.detach().clone() : Tensor();
    };
    for (std::size_t i = 0; i < results.size(); ++i) add("result " + std::to_string(i), results[i]);
    for (const auto& parameter : pipe->named_parameters()) {
      const bool is_own = is_one_of(*parameter, pipe->parameters());
      if (is_own) add("gradient of " + parameter.key(), parameter->grad());
      if (!is_own) EXPECT_FALSE(parameter->grad().defined()) << parameter.key();
      // A copy of another rank's parameter gets its value in the first call.
      if (is_own || call != "as made") add(parameter.key(), *parameter);
    }
    for (const auto& buffer : pipe->named_buffers()) add(buffer.key(), *buffer);
    add("generator", generator_state());
  }

  GPipe pipe{nullptr};
  std::unique_ptr<optim::Adam> adam;
  Record record;
};

/// What a snapshot has, whoever wrote which part of it.
std::pair<nlohmann::json, Record> content_of(const std::filesystem::path& path) {
  SnapshotReader reader(path);
  auto manifest = reader.manifest();
  for (auto& group : manifest["optimizer"]["param_groups"]) std::sort(group["params"].begin(), group["params"].end());
  Record tensors;
  for (const auto& file : manifest["files"]) {
    for (const std::string name : file["tensors"]) tensors[name] = reader.read(name);
  }
  manifest["random"] = manifest["random"][0];
  manifest.erase("files");
  manifest.erase("crc32");
  return {manifest, tensors};
}

void expect_equal_trainings(const std::shared_ptr<Ranks>& ranks) {
  const auto together = job_folder() / "together", alone = job_folder() / ("alone" + std::to_string(::getpid()));
  const auto expect_equal_snapshots = [&] {
    if (ranks->rank() != 0) return;
    const auto [manifest, tensors] = content_of(together);
    const auto [manifest_alone, tensors_alone] = content_of(alone);
    EXPECT_EQ(manifest, manifest_alone);
    EXPECT_EQ(tensors.size(), tensors_alone.size());
    expect_part_of(tensors, tensors_alone);
  };
  const auto train = [&](const std::shared_ptr<Ranks>& over, const std::filesystem::path& path) {
    Training training(kCut, over);
    training.step(9);
    training.step(6);
    training.save(path);
    training.use_graphs(/*has_input=*/!over || over->rank() == 0);
    training.convert();
    return training.record;
  };
  const auto expected = train(nullptr, alone);
  expect_part_of(train(ranks, together), expected);
  expect_equal_snapshots();
  // Goes on from the snapshot at another cut, also in one process.
  const auto resume = [&](const std::shared_ptr<Ranks>& over, const std::filesystem::path& path) {
    Training resumed(kOtherCut, over);
    EXPECT_EQ(load_snapshot(together, *resumed.pipe, resumed.adam.get()).step, 7);
    resumed.step(8);
    ranks->share("");  // all have loaded
    resumed.save(path);
  };
  resume(nullptr, alone);
  resume(ranks, together);
  expect_equal_snapshots();
}

/// So that all ranks can compare outputs.
JobOptions sharing(seconds limit, int replicas = 1) {
  return {.ranks = patient().share_outputs(true).replicas(replicas), .limit = limit};
}

RANKS_TEST(RanksTraining, OnTwoRanksEqualsOneProcess, 2, sharing(seconds(180))) { expect_equal_trainings(ranks); }
RANKS_TEST(RanksTraining, OnFourRanksEqualsOneProcess, 4, sharing(seconds(180))) { expect_equal_trainings(ranks); }

/// The seeds to begin with, and the number of cases for each number of ranks.
Seeds cases() { return seeds_from_environment(32); }

/// Runs generated cases that have enough workers and samples. All ranks generate the same.
void run_cases(const std::shared_ptr<Ranks>& ranks) {
  const auto seeds = cases();
  std::uint64_t run = 0;
  for (std::uint64_t seed = seeds.first; run < seeds.count; ++seed) {
    const auto spec = generate(seed, /*portable=*/seed % 2 == 1);
    const auto& [positions, replicas] = ranks->mesh();
    if (spec.workers < positions || spec.batch < replicas || spec.may_be_refused()) continue;
    if (replicas > 1 && spec.has(Unit::kAlone)) continue;
    ++run;
    const auto outcome = compare(spec, std::nullopt, ranks);
    if (outcome.verdict != Outcome::kDifferent) continue;
    ADD_FAILURE() << outcome.what << "\n  " << to_string(spec);
    break;  // the other ranks may wait
  }
}

// Pipelines over processes equal the reference bit by bit.
RANKS_TEST(RanksTransparency, TwoRanks, 2, sharing(seconds(60 + cases().count))) { run_cases(ranks); }
RANKS_TEST(RanksTransparency, FourRanks, 4, sharing(seconds(60 + cases().count))) { run_cases(ranks); }
RANKS_TEST(RanksTransparency, TwoReplicas, 4, sharing(seconds(60 + cases().count), 2)) { run_cases(ranks); }
RANKS_TEST(RanksTransparency, ThreeReplicas, 3, sharing(seconds(60 + cases().count), 3)) { run_cases(ranks); }

}  // namespace
}  // namespace gpipe
