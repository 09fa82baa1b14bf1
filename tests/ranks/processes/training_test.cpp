// Trainings over processes leave what they leave in one process, bit by bit: outputs, parameters, gradients, buffers,
// random numbers, and snapshots, from which a training goes on at another cut.

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

struct Cut {
  Balance balance;
  std::string schedule;
  int stages_per_worker = 1;
  int workers() const { return static_cast<int>(balance.size()) / (schedule == "zb_v" ? 2 : stages_per_worker); }
};

Tensor waves(std::int64_t samples) {
  return torch::arange(samples * kSide, torch::kFloat).reshape({samples, kSide}).sin();
}

/// A model to train, and how.
struct TrainedModel {
  std::string name;
  std::function<GPipe(const Balance&, const GPipeOptions&)> make;
  std::vector<Cut> cuts;  // the first can run on any number of ranks
  std::function<Tensor(std::int64_t samples)> input = waves;
  std::function<Tensor(const Tensor& input)> target = [](const Tensor& x) { return x.cos(); };
  LossFunction loss = kMse;
};

GPipe make_stateful(const Balance& balance, const GPipeOptions& options) {
  Sequential model(Linear(6, 6), nn::BatchNorm1d(6), Stash("a"), nn::Dropout(0.3), Linear(6, 6), nn::ReLU(), Pop("a"),
                   nn::BatchNorm1d(6), nn::Dropout(0.2), Linear(6, 6));
  model->ptr(4)->named_parameters()["bias"].requires_grad_(false);  // has no state in the optimizer
  return GPipe(model, balance, options);
}

/// Nine layers with skips and a buffer, of factories. The first and the last share a matrix.
GPipe make_of_factories(const Balance& balance, const GPipeOptions& options) {
  const auto matrix = std::make_shared<Tensor>();
  const auto first = [matrix] {
    Linear layer(kSide, kSide);
    *matrix = layer->weight;
    return layer;
  };
  const LayerFactories factories = {first,
                                    {"stash", [] { return Stash("a"); }},
                                    {"norm", [] { return nn::BatchNorm1d(kSide); }},
                                    {"dropout", [] { return nn::Dropout(0.3); }},
                                    {"stash_b", [] { return Stash("b"); }},
                                    {"linear", [] { return Linear(kSide, kSide); }},
                                    {"pop", [] { return Pop("a"); }},
                                    {"pop_b", [] { return Pop("b"); }},
                                    [matrix] { return Sharer(*matrix, mix); }};
  return GPipe(factories, balance, options);
}

const std::vector<TrainedModel> kTrainedModels = {
    {"stateful",
     make_stateful,
     {{{3, 1, 1, 5}, "gpipe"},  // the second stage has no parameters
      {{1, 1, 2, 1, 1, 1, 2, 1}, "zb_v"}}},
    {"tied",
     [](const auto& balance, const auto& options) { return GPipe(tied_model(torch::kFloat), balance, options); },
     // Layer 0 owns a matrix, which 2 and 6 share.
     {{{1, 2, 2, 2}, "1f1b"},                 // over two ranks, one stage borrows on the owner's, one on the other
      {{1, 6}, "zb_h1"},                      // two layers of one stage borrow
      {{1, 1, 1, 4}, "zb_h1"},                // two workers of a rank borrow
      {{1, 2, 2, 2}, "interleaved_1f1b", 2},  // two stages of a worker borrow
      {{1, 2, 2, 2}, "zb_v"}},
     words_of,
     next_words,
     kCrossEntropy},
    {"factories", make_of_factories, {{{3, 2, 3, 1}, "gpipe"}, {{1, 1, 1, 1, 4, 1}, "zb_v"}}}};

/// A training over ranks, or in one process if `ranks` is null, and what its calls leave.
class Training {
 public:
  Training(const TrainedModel& model, const Cut& cut, Checkpoint checkpoint, std::shared_ptr<Ranks> ranks)
      : model_(model), ranks_(ranks), is_first_(!ranks || ranks->rank() == 0) {
    torch::manual_seed(3);
    pipe_ = model.make(cut.balance, GPipeOptions()
                                        .chunks(3)
                                        .schedule(cut.schedule)
                                        .stages_per_worker(cut.stages_per_worker)
                                        .checkpoint(checkpoint)
                                        .deferred_batch_norm(checkpoint != Checkpoint::kExceptLast)
                                        .ranks(std::move(ranks)));
    std::vector<Tensor> matrices;
    std::vector<Tensor> vectors;
    for (const auto& parameter : pipe_->parameters()) {
      (parameter.dim() > 1 ? matrices : vectors).push_back(parameter);
    }
    const auto options = optim::AdamOptions(0.01).amsgrad(true);
    auto of_matrices = std::make_unique<optim::AdamOptions>(options);
    of_matrices->weight_decay(0.1);
    adam_ = std::make_unique<optim::Adam>(
        std::vector<optim::OptimizerParamGroup>{{matrices, std::move(of_matrices)},
                                                {vectors, std::make_unique<optim::AdamOptions>(options)}},
        options);
    note("as made", {});
  }

  void step(std::int64_t samples) {
    const auto x = model_.input(samples);
    const auto name = "step of " + std::to_string(samples);
    adam_->zero_grad();
    const auto result = pipe_->step(x, model_.target(x), model_.loss, StepOptions().return_output(true));
    pipe_->step(x, model_.target(x), model_.loss);  // accumulates
    adam_->step();
    note(name, {result.loss, result.output.tensor(), evaluate(samples + 1)});
  }

  void forward_and_backward(std::int64_t samples) {
    adam_->zero_grad();
    const auto output = pipe_->forward(model_.input(samples));
    output.sin().sum().backward();
    adam_->step();
    note("forward of " + std::to_string(samples), {output, evaluate(samples + 1)});
  }

  /// Several graphs at once, graphs that are used twice, and autograd's other entries.
  void use_graphs() {
    const auto x = model_.input(9);
    adam_->zero_grad();
    const auto one = pipe_->forward(x);
    const auto two = pipe_->forward(model_.input(6));
    two.sum().backward();
    (one * one).sum().backward({}, /*retain_graph=*/true);
    note("two graphs", {one, two});
    one.cos().sum().backward();
    { const auto dropped = pipe_->forward(x); }
    const auto loss = pipe_->compute_loss(x, model_.target(x), model_.loss);
    (2 * loss).backward();
    const auto output = pipe_->forward(x);
    auto trained = pipe_->parameters();
    std::erase_if(trained, [](const Tensor& parameter) { return !parameter.requires_grad(); });
    if (trained.empty()) {
      output.sum().backward();
    } else {
      const auto gradients = torch::autograd::grad({output.sum()}, trained, {}, false, false, /*allow_unused=*/true);
      for (std::size_t p = 0; p < trained.size(); ++p) add("grad of " + name_of(trained[p]), gradients[p]);
    }
    if (x.is_floating_point()) {
      const auto leaf = x.clone().requires_grad_();
      pipe_->forward(leaf).sum().backward();
      EXPECT_EQ(leaf.grad().defined(), is_first_);
      if (is_first_) add("gradient of the input", leaf.grad());
    }
    note("other entries", {loss, output});
  }

  /// Other layouts than in earlier calls.
  void convert() {
    pipe_->to(torch::kDouble);
    const auto x = model_.input(9);
    const auto in_double = [](const Tensor& tensor) {
      return tensor.is_floating_point() ? tensor.to(torch::kDouble) : tensor;
    };
    pipe_->step(in_double(x), in_double(model_.target(x)), model_.loss);
    note("in double", {});
  }

  /// Saves a snapshot and returns its path.
  std::filesystem::path save() {
    const auto path = job_folder() / (ranks_ ? "together" : "alone" + std::to_string(::getpid()));
    save_snapshot(path, *pipe_, adam_.get(), {.step = 7, .extra = R"({"batch": 2})"});
    return path;
  }

  void load(const std::filesystem::path& path) { EXPECT_EQ(load_snapshot(path, *pipe_, adam_.get()).step, 7); }

  const Record& record() const { return record_; }

 private:
  bool is_trained(const Tensor& parameter) const { return is_one_of(parameter, pipe_->parameters()); }

  /// The first name.
  std::string name_of(const Tensor& parameter) const {
    for (const auto& each : pipe_->named_parameters()) {
      if (each->is_same(parameter)) return each.key();
    }
    return "";
  }

  Tensor evaluate(std::int64_t samples) {
    const torch::NoGradGuard no_grad;
    pipe_->eval();
    const auto output = pipe_->forward(model_.input(samples));
    pipe_->train();
    return output;
  }

  void note(const std::string& call, const std::vector<Tensor>& results) {
    const bool is_first_call = record_.empty();
    for (std::size_t i = 0; i < results.size(); ++i) add(call + ": result " + std::to_string(i), results[i]);
    for (const auto& parameter : pipe_->named_parameters()) {
      const auto trained = is_trained(*parameter);
      // A copy of another rank's parameter gets its value in the next call.
      if (trained || !is_first_call) add(call + ": " + parameter.key(), *parameter);
      if (trained) add(call + ": gradient of " + parameter.key(), parameter->grad());
      if (!trained) EXPECT_FALSE(parameter->grad().defined()) << parameter.key();
    }
    for (const auto& buffer : pipe_->named_buffers()) add(call + ": " + buffer.key(), *buffer);
    add(call + ": generator", generator_state());
  }

  void add(const std::string& name, const Tensor& tensor) {
    record_[name] = tensor.defined() ? tensor.detach().clone() : Tensor();
  }

  const TrainedModel& model_;
  const std::shared_ptr<Ranks> ranks_;
  const bool is_first_;  // or alone
  GPipe pipe_{nullptr};
  std::unique_ptr<optim::Adam> adam_;
  Record record_;
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
  for (const auto& model : kTrainedModels) {
    for (std::size_t c = 0; c < model.cuts.size(); ++c) {
      const auto& cut = model.cuts[c];
      if (cut.workers() < ranks->size()) continue;
      const auto checkpoint = kModes[(c + ranks->size() / 2) % 3];
      SCOPED_TRACE(model.name + ", " + cut.schedule + ", cut " + std::to_string(c) + ", " + to_string(checkpoint));
      const auto train = [&](const std::shared_ptr<Ranks>& over) {
        Training training(model, cut, checkpoint, over);
        training.step(9);
        training.forward_and_backward(8);
        training.step(6);
        const auto path = training.save();
        training.use_graphs();
        training.convert();
        return std::pair(training.record(), path);
      };
      const auto alone = train(nullptr);
      const auto part = train(ranks);
      expect_part_of(part.first, alone.first);
      const auto expect_equal_content = [&](const auto& one, const auto& other) {
        if (ranks->rank() != 0) return;
        const auto [manifest, tensors] = content_of(one);
        const auto [other_manifest, other_tensors] = content_of(other);
        EXPECT_EQ(manifest, other_manifest);
        EXPECT_EQ(tensors.size(), other_tensors.size());
        expect_part_of(tensors, other_tensors);
      };
      expect_equal_content(part.second, alone.second);

      if (c != 1) continue;  // goes on from the snapshot at another cut, also in one process
      const auto resume = [&](const std::shared_ptr<Ranks>& over) {
        Training resumed(model, model.cuts[0], checkpoint, over);
        resumed.load(part.second);
        resumed.step(8);
        return resumed.save();
      };
      const auto expected = resume(nullptr);
      expect_equal_content(resume(ranks), expected);
    }
  }
}

/// So that all ranks can compare outputs.
JobOptions sharing(seconds limit) { return {.ranks = patient().share_outputs(true), .limit = limit}; }

RANKS_TEST(RanksTraining, OnTwoRanksEqualsOneProcess, 2, sharing(seconds(180))) { expect_equal_trainings(ranks); }
RANKS_TEST(RanksTraining, OnFourRanksEqualsOneProcess, 4, sharing(seconds(180))) { expect_equal_trainings(ranks); }

/// The seeds to begin with, and the number of cases for each number of ranks.
Seeds cases() { return seeds_from_environment(16); }

/// Runs generated cases that have enough workers. All ranks generate the same.
void run_cases(const std::shared_ptr<Ranks>& ranks) {
  const auto seeds = cases();
  std::uint64_t run = 0;
  for (std::uint64_t seed = seeds.first; run < seeds.count; ++seed) {
    const auto spec = generate(seed, /*portable=*/true);
    if (spec.workers < ranks->size()) continue;
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

}  // namespace
}  // namespace gpipe
