// Over processes, stages that share a parameter leave what they leave in one process.

#include <gmock/gmock.h>
#include <torch/torch.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "gpipe/rank_state.h"
#include "tests/gpipe/helpers.h"
#include "tests/gpipe/tied_model.h"
#include "tests/ranks/processes/job.h"

namespace gpipe {
namespace {

namespace nn = torch::nn;
namespace optim = torch::optim;

/// How to run the model, of whose layers 0 owns the matrix and 2 and 6 share it.
struct Cut {
  Balance balance;
  std::string schedule;
  int stages_per_worker = 1;
};

const std::vector<Cut> kOnTwoRanks = {
    {{3, 4}, "gpipe"},
    {{1, 6}, "zb_h1"},                      // two layers of one stage borrow
    {{1, 2, 2, 2}, "1f1b"},                 // one stage borrows on the owner's rank, one on the other
    {{1, 1, 1, 4}, "1f1b"},                 // two workers of a rank borrow
    {{1, 2, 2, 2}, "interleaved_1f1b", 2},  // two stages of a worker borrow
    {{1, 2, 2, 2}, "zb_v"},
};
const std::vector<Cut> kOnFourRanks = {{{1, 2, 2, 2}, "1f1b"}, {{1, 1, 1, 4}, "zb_h1"}};

GPipe make_pipe(const Cut& cut, Checkpoint checkpoint, std::shared_ptr<Ranks> ranks, const Sequential& model) {
  return GPipe(model, cut.balance,
               GPipeOptions()
                   .chunks(4)
                   .schedule(cut.schedule)
                   .stages_per_worker(cut.stages_per_worker)
                   .checkpoint(checkpoint)
                   .ranks(std::move(ranks)));
}

bool is_trained(const GPipe& pipe, const Tensor& parameter) {
  const auto trained = pipe->parameters();
  return std::any_of(trained.begin(), trained.end(), [&](const Tensor& it) { return it.is_same(parameter); });
}

using Record = std::map<std::string, Tensor>;

/// Notes the values of all parameters here, and the gradients of those that this rank trains.
void note_parameters(Record& record, const std::string& call, const GPipe& pipe) {
  for (const auto& parameter : pipe->named_parameters()) {
    record[call + parameter.key()] = parameter->detach().clone();
    const auto& gradient = parameter->grad();
    if (is_trained(pipe, *parameter)) {
      record[call + "gradient of " + parameter.key()] = gradient.defined() ? gradient.clone() : Tensor();
    } else {
      EXPECT_FALSE(gradient.defined()) << parameter.key();
    }
  }
}

/// Trains, evaluates, and trains on graphs that live at once.
Record train(const Cut& cut, Checkpoint checkpoint, const std::shared_ptr<Ranks>& ranks) {
  auto pipe = make_pipe(cut, checkpoint, ranks, tied_model(torch::kFloat));
  optim::SGD optimizer(pipe->parameters(), optim::SGDOptions(0.1).momentum(0.9).weight_decay(0.1));
  Record record;
  const auto x = words_of(11);
  const auto y = next_words(x);
  for (int i = 0; i < 4; ++i) {
    const auto call = std::to_string(i) + ": ";
    optimizer.zero_grad();
    if (i % 2 == 0) {
      record[call + "loss"] = pipe->step(x, y, kCrossEntropy).loss;
    } else {
      const auto output = pipe->forward(x);
      torch::cross_entropy_loss(output, y).backward();
      record[call + "output"] = output.detach();
    }
    optimizer.step();
    {
      const torch::NoGradGuard no_grad;
      pipe->eval();
      record[call + "evaluated"] = pipe->forward(x.slice(0, 0, 5 + i));
      pipe->train();
    }
    note_parameters(record, call, pipe);
  }
  optimizer.zero_grad();
  const auto one = pipe->forward(x);
  const auto two = pipe->forward(x.slice(0, 0, 7));
  two.square().sum().backward();
  one.sin().sum().backward();
  note_parameters(record, "two graphs: ", pipe);
  return record;
}

void expect_part_of(const Record& part, const Record& whole) {
  for (const auto& [name, tensor] : part) {
    const auto found = whole.find(name);
    ASSERT_NE(found, whole.end()) << name;
    EXPECT_TRUE(same(tensor, found->second)) << name;
  }
}

void expect_equal_training(const std::shared_ptr<Ranks>& ranks, const std::vector<Cut>& cuts) {
  for (const auto& cut : cuts) {
    for (const auto checkpoint : kModes) {
      SCOPED_TRACE(cut.schedule + ", " + std::to_string(cut.balance.size()) + " stages, " + to_string(checkpoint));
      expect_part_of(train(cut, checkpoint, ranks), train(cut, checkpoint, nullptr));
    }
  }
}

TEST(RanksTied, TwoRanksTrainAsOneProcess) {
  expect_job(2, [](const auto& ranks) { expect_equal_training(ranks, kOnTwoRanks); });
}

TEST(RanksTied, FourRanksTrainAsOneProcess) {
  expect_job(4, [](const auto& ranks) { expect_equal_training(ranks, kOnFourRanks); });
}

TEST(RanksTied, TheOwnersRankFreezesTheParameter) {
  expect_job(2, [](const std::shared_ptr<Ranks>& ranks) {
    for (const auto checkpoint : kModes) {
      SCOPED_TRACE(to_string(checkpoint));
      const auto run = [&](const std::shared_ptr<Ranks>& over) {
        auto pipe = make_pipe({{1, 6}, "1f1b"}, checkpoint, over, tied_model());
        Record record;
        for (const bool trained : {false, true, false}) {
          if (pipe->is_here(0)) pipe->parameters()[0].set_requires_grad(trained);
          pipe->zero_grad();
          pipe->forward(words_of(8)).square().sum().backward();
          note_parameters(record, trained ? "trained: " : "frozen: ", pipe);
          pipe->step(words_of(8), next_words(words_of(8)), kCrossEntropy);
          note_parameters(record, trained ? "step: " : "frozen step: ", pipe);
        }
        return record;
      };
      expect_part_of(run(ranks), run(nullptr));
    }
  });
}

/// The bytes of the file after a training, which a snapshot may begin; empty on ranks other than the first.
std::string trained_file(const Cut& cut, const std::shared_ptr<Ranks>& ranks, const std::string& begin = "") {
  auto pipe = make_pipe(cut, Checkpoint::kExceptLast, ranks, tied_model(torch::kFloat));
  optim::Adam optimizer(pipe->parameters(), optim::AdamOptions(0.01).weight_decay(0.1));
  if (!begin.empty()) {
    const auto part = own_part(*pipe, from_bytes(begin));
    restore_model(*pipe, part.model);
    restore_optimizer(optimizer, *pipe, part.optimizer);
    const torch::NoGradGuard no_grad;
    pipe->forward(words_of(4));
  }
  for (int i = 0; i < 2; ++i) {
    optimizer.zero_grad();
    pipe->step(words_of(8), next_words(words_of(8)), kCrossEntropy);
    optimizer.step();
  }
  Snapshot mine;
  mine.model = capture_model(*pipe);
  mine.optimizer = capture_optimizer(optimizer, *pipe);
  const auto whole = gather(*pipe, mine);
  return ranks && ranks->rank() != 0 ? "" : to_bytes(whole);
}

void expect_same_files(const std::shared_ptr<Ranks>& ranks, const std::vector<Cut>& cuts) {
  const auto expect_file = [&](const std::string& file, const std::string& expected) {
    if (ranks->rank() == 0) EXPECT_TRUE(file == expected);
  };
  for (const auto& cut : cuts) {
    SCOPED_TRACE(cut.schedule + ", " + std::to_string(cut.balance.size()) + " stages");
    const auto first = trained_file(cut, nullptr);
    expect_file(trained_file(cut, ranks), first);
    const auto& other = cuts.front();
    expect_file(trained_file(other, ranks, first), trained_file(other, nullptr, first));
  }
}

TEST(RanksTied, TwoRanksWriteTheFileOfOneProcess) {
  expect_job(2, [](const auto& ranks) { expect_same_files(ranks, kOnTwoRanks); });
}

TEST(RanksTied, FourRanksWriteTheFileOfOneProcess) {
  expect_job(4, [](const auto& ranks) { expect_same_files(ranks, kOnFourRanks); });
}

TEST(RanksTied, TheParameterCountsOnce) {
  expect_job(2, [](const std::shared_ptr<Ranks>& ranks) {
    auto pipe = make_pipe({{1, 6}, "gpipe"}, Checkpoint::kNever, ranks, tied_model());
    const std::vector<double> numbers = ranks->rank() == 0 ? std::vector<double>{0} : std::vector<double>{1, 2, 3, 4};
    EXPECT_THAT(pipe->of_all_parameters(numbers), ::testing::ElementsAre(0, 1, 2, 3, 4));

    // An optimizer of the module's parameters has the copies too.
    const nn::Module& module = *pipe;
    optim::SGD optimizer(distinct_parameters(module), optim::SGDOptions(0.1));
    Snapshot mine;
    mine.model = capture_model(*pipe);
    mine.optimizer = capture_optimizer(optimizer, *pipe);
    const auto gather_it = [&] { gather(*pipe, mine); };
    const std::string message = "the optimizer has '2.weight', which another rank trains as '0.weight'";
    if (ranks->rank() == 1) EXPECT_THAT(gather_it, throws<std::invalid_argument>(message));
    if (ranks->rank() == 0) EXPECT_THAT(gather_it, throws<std::runtime_error>(message));
    EXPECT_TRUE(pipe->ties_unchanged());
  });
}

/// Expects an error of rank 1's, of which rank 0 is told.
template <class Error>
void expect_failure(int rank, const std::function<void()>& call, const std::string& message) {
  if (rank == 1) EXPECT_THAT(call, throws<Error>(message));
  if (rank == 0) EXPECT_THAT(call, throws<std::runtime_error>("rank 1 failed"));
}

TEST(RanksTied, AGraphOfAFormerValueIsRefused) {
  expect_job(2, [](const std::shared_ptr<Ranks>& ranks) {
    auto pipe = make_pipe({{1, 6}, "gpipe"}, Checkpoint::kNever, ranks, tied_model());
    const auto loss = pipe->forward(words_of(8)).sum();
    const torch::NoGradGuard no_grad;
    if (ranks->rank() == 0) pipe->parameters()[0].mul_(2);
    pipe->forward(words_of(8));
    expect_failure<c10::Error>(
        ranks->rank(), [&] { loss.backward(); }, "modified by an inplace operation");
  });
}

TEST(RanksTied, ChangedBetweenForwardAndBackwardAreRefused) {
  expect_job(2, [](const std::shared_ptr<Ranks>& ranks) {
    auto pipe = make_pipe({{1, 6}, "gpipe"}, Checkpoint::kAlways, ranks, tied_model());
    const auto loss = pipe->forward(words_of(8)).sum();
    const torch::NoGradGuard no_grad;
    if (ranks->rank() == 0) pipe->parameters()[0].mul_(2);
    EXPECT_THAT([&] { loss.backward(); }, throws<std::runtime_error>("a parameter was changed in place between"));
    EXPECT_NO_THROW(pipe->forward(words_of(8)));
  });
}

TEST(RanksTied, MayNotBeWrittenToByALayer) {
  expect_job(2, [](const std::shared_ptr<Ranks>& ranks) {
    auto model = tied_model();
    model->at<SharerImpl>(6).function = [](const Tensor& x, Tensor weight) {
      const torch::NoGradGuard no_grad;
      weight.mul_(0.5);
      return x.clone();
    };
    auto pipe = make_pipe({{3, 4}, "gpipe"}, Checkpoint::kNever, ranks, model);
    expect_failure<std::runtime_error>(
        ranks->rank(), [&] { pipe->forward(words_of(8)); }, "wrote to a parameter that several stages share");
  });
}

TEST(RanksTied, TheRanksMustConvertTheModelAlike) {
  expect_job(2, [](const std::shared_ptr<Ranks>& ranks) {
    auto pipe = make_pipe({{3, 4}, "gpipe"}, Checkpoint::kNever, ranks, tied_model());
    if (ranks->rank() == 0) pipe->to(torch::kFloat);
    expect_failure<std::runtime_error>(
        ranks->rank(), [&] { pipe->forward(words_of(8)); },
        "is Float[11, 6] on the rank that owns it, but Double[11, 6] on this rank");
  });
}

}  // namespace
}  // namespace gpipe
