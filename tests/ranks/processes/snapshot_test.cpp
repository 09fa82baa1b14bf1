// Over ranks, snapshots are those of one process, byte by byte, and are read at any number of ranks.

#include <gmock/gmock.h>
#include <torch/torch.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <memory>
#include <string>

#include "gpipe/rank_state.h"
#include "tests/gpipe/helpers.h"
#include "tests/ranks/processes/job.h"

namespace gpipe {
namespace {

namespace nn = torch::nn;
namespace optim = torch::optim;
using ::testing::HasSubstr;

/// How to run and train a model of ten layers.
struct Way {
  Balance balance;
  std::string schedule;
  int stages_per_worker = 1;
  bool adam = true;
};

const std::vector<Way> kWays = {
    {{3, 1, 1, 5}, "gpipe"},  // the second stage has no parameters
    {{1, 4, 3, 2}, "1f1b", 1, /*adam=*/false},
    {{1, 1, 1, 1, 1, 1, 2, 2}, "zb_v", 1},
    {{2, 1, 1, 1, 1, 1, 2, 1}, "interleaved_1f1b", 2, /*adam=*/false},
};

Sequential model() {
  return Sequential(Linear(6, 6), nn::BatchNorm1d(6), nn::Tanh(), nn::Dropout(0.3), Linear(6, 6), nn::Tanh(),
                    Linear(6, 6), nn::BatchNorm1d(6), nn::Tanh(), Linear(6, 6));
}

/// Weights and biases in two groups.
template <class Optimizer, class Options>
std::unique_ptr<optim::Optimizer> with_groups(const GPipe& pipe, Options options, double decay) {
  std::vector<Tensor> weights;
  std::vector<Tensor> biases;
  for (const auto& parameter : pipe->parameters()) (parameter.dim() > 1 ? weights : biases).push_back(parameter);
  auto of_weights = std::make_unique<Options>(options);
  of_weights->weight_decay(decay);
  return std::make_unique<Optimizer>(
      std::vector<optim::OptimizerParamGroup>{{weights, std::move(of_weights)},
                                              {biases, std::make_unique<Options>(options)}},
      options);
}

/// A training in one process, if `ranks` is null, or over ranks.
struct Training {
  Training(const Way& way, std::shared_ptr<Ranks> ranks) {
    torch::manual_seed(3);
    auto layers = model();
    layers->ptr(6)->named_parameters()["bias"].requires_grad_(false);  // has no state in the optimizer
    pipe = GPipe(layers, way.balance,
                 GPipeOptions()
                     .chunks(4)
                     .schedule(way.schedule)
                     .stages_per_worker(way.stages_per_worker)
                     .ranks(std::move(ranks)));
    if (way.adam) {
      optimizer = with_groups<optim::Adam>(pipe, optim::AdamOptions(0.01).amsgrad(true), 0.1);
    } else {
      optimizer = with_groups<optim::SGD>(pipe, optim::SGDOptions(0.01).momentum(0.9), 0.1);
    }
  }

  void train(int steps = 2) {
    for (int step = 0; step < steps; ++step) {
      const auto x = torch::arange(48, torch::kFloat).reshape({8, 6}).sin();
      optimizer->zero_grad();
      pipe->step(x, x.cos(), tensor_loss([](const Tensor& out, const Tensor& t) { return torch::mse_loss(out, t); }));
      optimizer->step();
    }
  }

  Snapshot capture() const {
    Snapshot snapshot;
    snapshot.model = capture_model(*pipe);
    snapshot.optimizer = capture_optimizer(*optimizer, *pipe);
    snapshot.epoch = 7;
    snapshot.position = {{"batch", 2}};
    snapshot.random = capture_random();
    snapshot.options = {{"--seed", "3"}};
    snapshot.history = {{"loss", {0.5, 0.25}}};
    return snapshot;
  }

  void restore(const Snapshot& whole) {
    const auto part = own_part(*pipe, whole);
    restore_model(*pipe, part.model);
    restore_optimizer(*optimizer, *pipe, part.optimizer);
    restore_random(part.random);
  }

  GPipe pipe{nullptr};
  std::unique_ptr<optim::Optimizer> optimizer;
};

/// The file that rank 0 writes; empty on the other ranks.
std::string file_of(Training& training) {
  const auto whole = gather(*training.pipe, training.capture());
  if (!training.capture().model.contains("0.weight")) {  // of rank 0
    EXPECT_TRUE(whole.model.is_empty());
    return "";
  }
  const auto path = std::filesystem::temp_directory_path() / ("gpipe_snapshot_" + std::to_string(getpid()));
  write_snapshot(path, whole);
  std::ifstream file(path, std::ios::binary);
  std::string bytes(std::istreambuf_iterator<char>(file), {});
  EXPECT_TRUE(bytes == to_bytes(whole));
  std::filesystem::remove(path);
  return bytes;
}

void expect_same_files(const std::shared_ptr<Ranks>& ranks) {
  for (const auto& way : kWays) {
    SCOPED_TRACE(way.schedule);
    Training alone(way, nullptr);
    alone.train();
    const auto expected = file_of(alone);

    Training together(way, ranks);
    together.train();
    const auto file = file_of(together);
    if (ranks->rank() == 0) EXPECT_TRUE(file == expected);

    // Training goes on as if it had never stopped, also at another cut, schedule and number of processes.
    alone.train();
    const auto later = file_of(alone);
    const auto resumed_file = [&](const auto& at, const std::shared_ptr<Ranks>& with) {
      Training resumed(at, with);
      resumed.restore(from_bytes(expected));
      resumed.train();
      return file_of(resumed);
    };
    const auto file_later = resumed_file(way, ranks);
    if (ranks->rank() == 0) EXPECT_TRUE(file_later == later);
    for (const auto& other : kWays) {
      if (other.adam != way.adam || other.schedule == way.schedule) continue;
      SCOPED_TRACE("resumed with " + other.schedule);
      const auto of_one = resumed_file(other, nullptr);
      const auto of_many = resumed_file(other, ranks);
      if (ranks->rank() == 0) EXPECT_TRUE(of_many == of_one);
    }
  }
}

TEST(RanksSnapshot, FourRanksWriteTheFileOfOneProcess) { expect_job(4, expect_same_files); }

TEST(RanksSnapshot, TwoRanksWriteTheFileOfOneProcess) { expect_job(2, expect_same_files); }

TEST(RanksSnapshot, TheStateOfAnotherModelIsRefused) {
  expect_job(2, [](const std::shared_ptr<Ranks>& ranks) {
    Training training(kWays[0], ranks);
    const auto has_first_layer = ranks->rank() == 0;
    Training alone(kWays[0], nullptr);
    const auto good = alone.capture();

    auto larger = good;
    larger.model.insert("10.weight", torch::ones({2}));
    EXPECT_THAT([&] { training.restore(larger); }, throws<std::invalid_argument>("'10.weight'"));
    larger = good;
    larger.optimizer.param_groups[0].params.push_back("10.weight");
    EXPECT_THAT([&] { training.restore(larger); }, throws<std::invalid_argument>("'10.weight'"));

    // Each rank restores its own part.
    auto smaller = good;
    smaller.model.erase("0.weight");
    const auto restore = [&] { training.restore(smaller); };
    if (has_first_layer) EXPECT_THAT(restore, throws<std::invalid_argument>("'0.weight' is missing"));
    if (!has_first_layer) EXPECT_NO_THROW(restore());
    EXPECT_NO_THROW(training.restore(good));
  });
}

TEST(RanksSnapshot, RanksThatGatherDifferentStatesAreTold) {
  expect_job(2, [](const std::shared_ptr<Ranks>& ranks) {
    const int rank = ranks->rank();
    Training training(kWays[0], ranks);
    training.train();
    const auto good = training.capture();
    const auto gather_it = [&](const Snapshot& mine) { return [&] { gather(*training.pipe, mine); }; };

    auto other = good;
    if (rank == 1) other.optimizer.param_groups[1].options["lr"] = 0.02;
    EXPECT_THAT(gather_it(other), throws<std::runtime_error>("lr=0.02"));
    other = good;
    if (rank == 1) other.optimizer.type = "AdamW";
    EXPECT_THAT(gather_it(other),
                throws<std::runtime_error>("rank 1 calls gather of the state of the optimizer 'AdamW'"));
    other = good;
    if (rank == 1) other.optimizer.param_groups.pop_back();
    EXPECT_THAT(gather_it(other), throws<std::runtime_error>("make the same calls"));

    // What a rank alone can see is its own error, and the others' too.
    const auto expect_refused = [&](const Snapshot& mine, const std::string& what) {
      if (rank == 1) {
        EXPECT_THAT(gather_it(mine), throws<std::invalid_argument>(what));
      } else {
        EXPECT_THAT(gather_it(good), throws<std::runtime_error>("rank 1 refused the call: [gpipe] " + what));
      }
    };
    other = good;
    if (rank == 1) other.model.erase("9.weight");
    expect_refused(other, "the snapshot lacks '9.weight'");
    other = good;
    other.optimizer.state["0.weight"] = {};
    expect_refused(other, "the snapshot has '0.weight'");
    if (rank == 1) {
      EXPECT_THAT([&] { training.pipe->largest(1); }, throws<std::runtime_error>("rank 1 calls largest"));
    } else {
      EXPECT_THAT(gather_it(good), throws<std::runtime_error>("rank 1 calls largest, but rank 0 calls gather of"));
    }

    EXPECT_EQ(gather(*training.pipe, good).model.contains("9.weight"), rank == 0);
    training.train();
  });
}

TEST(RanksSnapshot, ARankIsLostBeforeItsState) {
  const auto ends = run_job(2, [](const std::shared_ptr<Ranks>& ranks) {
    Training training(kWays[0], ranks);
    training.train();
    if (ranks->rank() == 1) raise(SIGKILL);
    gather(*training.pipe, training.capture());
  });
  EXPECT_EQ(ends[0].status, 2) << ends[0].output;
  EXPECT_THAT(ends[0].output, HasSubstr("rank 1 was lost"));
}

/// Gathers and writes snapshots until an error ends it. All values in a snapshot are the number of the gather.
void write_snapshots(const std::shared_ptr<Ranks>& ranks, const std::filesystem::path& path,
                     const std::function<void()>& after_first) {
  constexpr std::int64_t kLarge = 1500;  // so that most of the time is spent in the transfer
  GPipe pipe(Sequential(Linear(kLarge, kLarge), Linear(kLarge, kLarge), Linear(kLarge, kLarge)), Balance{1, 1, 1},
             GPipeOptions().ranks(ranks));
  for (int number = 1;; ++number) {
    const torch::NoGradGuard no_grad;
    for (auto& parameter : pipe->parameters()) parameter.fill_(number);
    Snapshot mine;
    mine.model = capture_model(*pipe);
    mine.epoch = number;
    const auto whole = gather(*pipe, mine);
    if (ranks->rank() == 0) write_snapshot(path, whole);
    if (number == 1) {
      pipe->largest(0);  // the file is there now
      after_first();
    }
  }
}

TEST(RanksSnapshot, ARankIsKilledWhileTheyGather) {
  constexpr int kRanks = 3;
  const bool is_rank = rank_of_this_process() >= 0;
  const auto folder =
      std::filesystem::temp_directory_path() / ("gpipe_gather_" + std::to_string(is_rank ? getppid() : getpid()));
  const auto path = folder / "latest.snapshot";
  repeat_job(number_of_kills(), [&](int kill) {
    const int culprit = (kill + 1) % kRanks;
    if (!is_rank) std::filesystem::create_directory(folder);
    const auto ends = run_job(kRanks, [&](const std::shared_ptr<Ranks>& ranks) {
      write_snapshots(ranks, path, [&] {
        if (ranks->rank() == culprit) kill_after(std::chrono::microseconds(kill * 102947 % 300000));
      });
    });
    for (int r = 0; r < kRanks; ++r) {
      EXPECT_EQ(ends[r].status, r == culprit ? -SIGKILL : 2) << "rank " << r << ":\n" << ends[r].output;
      if (r == culprit) continue;
      EXPECT_THAT(ends[r].output, HasSubstr("rank " + std::to_string(culprit) + " was lost")) << "rank " << r;
    }
    const auto snapshot = read_snapshot(path);
    EXPECT_EQ(snapshot.model.size(), 6);
    for (const auto& tensor : snapshot.model) {
      EXPECT_TRUE(tensor->eq(snapshot.epoch).all().item<bool>()) << tensor.key();
    }
    const auto files = std::distance(std::filesystem::directory_iterator(folder), {});
    if (culprit != 0) EXPECT_EQ(files, 1);  // a rank 0 that is killed while it writes leaves a second one
    std::filesystem::remove_all(folder);
  });
}

}  // namespace
}  // namespace gpipe
