// A rank that fails ends the call on all ranks, with the cause.
//
// Only a rank that stops or hangs is told by a time-out. The message says so.

#include <ATen/autocast_mode.h>
#include <unistd.h>

#include <csignal>
#include <fstream>
#include <thread>

#include "absl/cleanup/cleanup.h"
#include "tests/gpipe/instruments.h"
#include "tests/ranks/processes/job.h"

namespace gpipe {
namespace {

constexpr int kRanks = 3;

/// A pipeline of three ranks, each with faulty layers.
struct Subject {
  explicit Subject(std::shared_ptr<Ranks> ranks, const std::string& schedule = "gpipe",
                   Checkpoint checkpoint = Checkpoint::kNever, int stages = kRanks) {
    torch::manual_seed(1);
    Sequential model;
    for (int s = 0; s < stages; ++s) {
      model->push_back(Linear(4, 4));
      model->push_back(Faulty(plan));
    }
    pipe = GPipe(model, Balance(stages, 2),
                 GPipeOptions().chunks(4).schedule(schedule).checkpoint(checkpoint).ranks(std::move(ranks)));
  }

  /// Calls `fault` in the second micro-batch of a pass.
  void arm(FaultPlan::Where where, std::function<void()> fault) {
    plan->arm(where, [fault, passes = std::make_shared<std::atomic<int>>(0)] {
      if (++*passes == 2) fault();
    });
  }
  void forward() { pipe->forward(torch::ones({8, 4})); }
  void forward_and_backward() { pipe->forward(torch::ones({8, 4})).sum().backward(); }
  void step(const Tensor& x = torch::ones({8, 4})) { pipe->step(x, torch::ones_like(x), kMse); }

  std::shared_ptr<FaultPlan> plan = std::make_shared<FaultPlan>();
  GPipe pipe{nullptr};
};

RANKS_TEST(RanksFailures, ALayerThrows, kRanks) {
  struct Case {
    FaultPlan::Where where;
    std::string schedule;  // empty: forward and backward
    std::string action;    // empty: any
    int stages = kRanks;
  };
  const std::vector<Case> cases = {
      {FaultPlan::kForward, "", "F1"},       {FaultPlan::kBackward, "", "B2"},
      {FaultPlan::kRecompute, "", "R2"},     {FaultPlan::kForward, "1f1b", "F1"},
      {FaultPlan::kBackward, "zb_h1", "I1"}, {FaultPlan::kBackward, "zb_v", "", 2 * kRanks}};
  const int rank = ranks->rank();
  for (const auto& test : cases) {
    for (int culprit = 0; culprit < kRanks; ++culprit) {
      SCOPED_TRACE(test.schedule + " " + test.action + " on rank " + std::to_string(culprit));
      const auto checkpoint = test.where == FaultPlan::kRecompute ? Checkpoint::kAlways : Checkpoint::kNever;
      Subject subject(new_ranks(kRanks), test.schedule.empty() ? "gpipe" : test.schedule, checkpoint, test.stages);
      const auto call = [&] { test.schedule.empty() ? subject.forward_and_backward() : subject.step(); };
      call();
      if (rank == culprit) subject.arm(test.where, [] { throw std::runtime_error("injected"); });
      const auto stage = std::to_string(culprit);
      auto cause = "rank " + stage + " failed in ";
      if (!test.action.empty()) {
        cause += stage + test.action + " (stage " + stage + ", micro-batch " + test.action.substr(1);
        const bool has_layer = test.action[0] == 'F' || test.action[0] == 'R';
        if (has_layer) cause += ", layer '" + std::to_string(2 * culprit + 1) + "'";
        cause += "): injected";
      }
      // The last actions of rank 0 are the last of all, so the other ranks may learn of its failure in a later call.
      auto message = message_from(call);
      while (message == "nothing") message = message_from(call);
      EXPECT_THAT(message, HasSubstr(rank == culprit ? "injected" : cause));
      subject.plan->disarm();
      EXPECT_THAT(message_from(call), AllOf(HasSubstr("cannot be used any more"), HasSubstr(cause)));
    }
  }
}

/// Trains and gathers until an error ends it.
void train(const std::shared_ptr<Ranks>& ranks, const std::function<void(Subject&)>& prepare) {
  Subject subject(ranks, "1f1b");
  prepare(subject);
  for (;;) {
    subject.step();
    subject.forward_and_backward();
    subject.pipe->team().gather(std::string(4'000'000, 'x'));
    const torch::NoGradGuard no_grad;
    subject.forward();
  }
}

/// Kills a rank at a random moment: the first ones while they train, later ones also while the ranks meet.
TEST(RanksFailures, ARankIsKilled) {
  const char* kills = std::getenv("GPIPE_KILLS");
  for (int kill = 0; kill < (kills == nullptr ? 3 : std::atoi(kills)) && !HasFailure(); ++kill) {
    const int culprit = kill % kRanks;
    const bool early = kill % 10 > 6;
    const auto body = [&](const std::shared_ptr<Ranks>& ranks) {
      const auto kill_later = [&] {
        if (ranks->rank() != culprit) return;
        std::thread([delay = std::chrono::microseconds(kill * 102947 % (early ? 50000 : 200000))] {
          std::this_thread::sleep_for(delay);
          raise(SIGKILL);
        }).detach();
      };
      if (early) kill_later();
      train(ranks, [&](Subject&) {
        if (!early) kill_later();
      });
    };
    const auto limit = seconds(early ? 4 : 20);
    const auto ends = run_job(kRanks, body, {.ranks = RanksOptions().timeout(limit).join_timeout(limit)});
    EXPECT_EQ(ends[culprit].status, -SIGKILL);
    expect_failed(ends, culprit, "rank " + std::to_string(culprit) + (early ? "" : " was lost"));
  }
}

TEST(RanksFailures, ARankIsStoppedOrKilledInALayer) {
  constexpr int kCulprit = 2;
  struct Case {
    std::function<void()> fault;
    seconds timeout;
    std::string cause;
  };
  const std::vector<Case> cases = {{[] { raise(SIGSTOP); }, seconds(2), " did not answer in time: rank "},
                                   {[] {
                                      if (fork() == 0) {  // a child that lives on, as a worker of a data loader
                                        std::this_thread::sleep_for(seconds(30));
                                        std::_Exit(0);
                                      }
                                      raise(SIGKILL);
                                    },
                                    seconds(20), "rank 2 was lost"}};
  for (const auto& test : cases) {
    const auto body = [&](const std::shared_ptr<Ranks>& ranks) {
      train(ranks, [&](Subject& subject) {
        if (ranks->rank() == kCulprit) subject.arm(FaultPlan::kForward, test.fault);
      });
    };
    const auto ends = run_job(kRanks, body, {.ranks = patient().timeout(test.timeout)});
    EXPECT_EQ(ends[kCulprit].status, -SIGKILL);  // of one that is stopped, by the test
    expect_failed(ends, kCulprit, test.cause);
  }
}

/// Something that one rank does instead of making and using a pipeline, and what the other ranks are told.
TEST(RanksFailures, ARankDoesNotComeOrLeaves) {
  struct Case {
    std::string name;
    std::function<void(const std::shared_ptr<Ranks>&, bool is_culprit)> run;
    std::string cause;  // on the others
    int status = 0;     // of the culprit
    int culprit = 1;
  };
  const std::vector<Case> cases = {
      {"fails before its text",
       [](const auto& ranks, bool is_culprit) {
         if (is_culprit) throw std::runtime_error("no plan");
         ranks->share("");
       },
       "a rank has failed: rank 0 ended with an exception outside of the pipeline", 2, 0},
      {"leaves before its text",
       [](const auto& ranks, bool is_culprit) {
         if (!is_culprit) ranks->share("");
       },
       "rank 0 has left the job", 0, 0},
      {"leaves its loop early",
       [](const auto& ranks, bool is_culprit) {
         Subject subject(ranks, "zb_h1");
         for (int i = 0; i < (is_culprit ? 2 : 3); ++i) subject.step();
       },
       "rank 1 has destroyed its pipeline"},
      {"ends with an exception",
       [](const auto& ranks, bool is_culprit) {
         for (Subject subject(ranks);;) {
           subject.step();
           if (is_culprit) throw std::runtime_error("no more data");
         }
       },
       "rank 1 ended with an exception outside of the pipeline", 2},
  };
  for (const auto& test : cases) {
    SCOPED_TRACE(test.name);
    const auto body = [&](const std::shared_ptr<Ranks>& ranks) { test.run(ranks, ranks->rank() == test.culprit); };
    const auto ends = run_job(kRanks, body);
    EXPECT_EQ(ends[test.culprit].status, test.status) << ends[test.culprit].output;
    expect_failed(ends, test.culprit, test.cause);
  }
}

RANKS_TEST(RanksFailures, RanksDisagree, kRanks) {
  struct Case {
    std::function<void(GPipeOptions&, Balance&, Sequential&)> change;  // on rank 1
    std::string name, value, changed;
  };
  const std::vector<Case> cases = {
      {[](auto&, auto& balance, auto&) { std::swap(balance[1], balance[2]); }, "the balance", "[1, 2, 1]", "[1, 1, 2]"},
      {[](auto& options, auto&, auto&) { options.chunks(3); }, "chunks", "2", "3"},
      {[](auto& options, auto&, auto&) { options.schedule("1f1b"); }, "the schedule", "gpipe", "1f1b"},
      {[](auto& options, auto&, auto&) {
         options.placement({2, 1, 0});
       },
       "the placement", "[0, 1, 2]", "[2, 1, 0]"},
      {[](auto& options, auto&, auto&) { options.checkpoint(Checkpoint::kAlways); }, "the checkpoint mode",
       "except_last", "always"},
      {[](auto&, auto&, auto& model) { model = Sequential(Linear(4, 4), Linear(4, 4), Linear(4, 5), Linear(5, 4)); },
       "layer 2", "'2', weight Float[4, 4], bias", "'2', weight Float[5, 4]"},
      {[](auto&, auto&, auto& model) { model->parameters()[4].requires_grad_(false); }, "layer 2", "weight Float[4, 4]",
       "weight Float[4, 4] frozen"},
  };
  for (const auto& test : cases) {
    SCOPED_TRACE(test.name + " " + test.changed);
    GPipeOptions options = GPipeOptions().chunks(2).ranks(new_ranks(kRanks));
    Balance balance = {1, 2, 1};
    torch::manual_seed(1);
    Sequential model(Linear(4, 4), Linear(4, 4), Linear(4, 4), Linear(4, 4));
    if (ranks->rank() == 1) test.change(options, balance, model);
    EXPECT_THAT(message_from([&] { GPipe(model, balance, options); }),
                AllOf(HasSubstr("the ranks differ in " + test.name + ": rank 0 has"), HasSubstr(test.value),
                      HasSubstr("but rank 1 has"), HasSubstr(test.changed)));
  }
}

RANKS_TEST(RanksFailures, SchedulesOfOneNameDiffer, kRanks) {
  const auto file = std::filesystem::temp_directory_path() / ("gpipe_schedule_" + std::to_string(getpid()));
  const absl::Cleanup remove = [&] { std::filesystem::remove(file); };
  std::ofstream(file) << "0F0 0F1 0B0 0B1\n1F0 1F1 1B0 1B1\n"
                      << (ranks->rank() == 1 ? "2F0 2B0 2F1 2B1" : "2F0 2F1 2B0 2B1");
  GPipe pipe(Sequential(Linear(4, 4), Linear(4, 4), Linear(4, 4)), {1, 1, 1},
             GPipeOptions().schedule("@" + file.string()).chunks(2).checkpoint(Checkpoint::kNever).ranks(ranks));
  const auto step = [&] { pipe->step(torch::ones({8, 4}), torch::ones({8, 4}), kMse); };
  EXPECT_THAT(message_from(step), HasSubstr("rank 1 has another schedule for 'step of micro-batches [4, 4], checkp"));
  EXPECT_EQ(message_from([&] { pipe->forward(torch::ones({8, 4})); }), "nothing");
}

RANKS_TEST(RanksFailures, CallsDiffer, kRanks) {
  Subject subject(ranks);
  const auto step = [&] { subject.step(); };
  const auto forward = [&] { subject.forward(); };
  const auto shorter = [&] { subject.step(torch::ones({6, 4})); };
  const auto without_gradients = [&] {
    const torch::NoGradGuard no_grad;
    subject.forward();
  };
  const auto with_autocast = [&] {
    at::autocast::set_autocast_enabled(at::kCUDA, true);
    const absl::Cleanup off = [] { at::autocast::set_autocast_enabled(at::kCUDA, false); };
    subject.forward();
  };
  struct Case {
    int rank;
    std::function<void()> on_it, on_others;
    std::string message;
  };
  const std::vector<Case> cases = {{1, shorter, step,
                                    "rank 1 calls step of micro-batches [2, 2, 1, 1], checkpoint never, but rank 0 "
                                    "calls step of micro-batches [2, 2, 2, 2]"},
                                   {0, without_gradients, forward, "but rank 0 calls forward of micro-batches"},
                                   {2, with_autocast, forward, "autocast of cuda to Half, but rank 0"}};
  for (const auto& test : cases) {
    EXPECT_THAT(message_from(ranks->rank() == test.rank ? test.on_it : test.on_others), HasSubstr(test.message));
  }
  // One rank leaves its backward out, and makes the next call.
  const auto output = subject.pipe->forward(torch::ones({8, 4})).sum();
  EXPECT_THAT(message_from([&] { ranks->rank() == 1 ? step() : output.backward(); }),
              HasSubstr("rank 1 calls step of micro-batches [2, 2, 2, 2], checkpoint never, but rank 0 calls the "
                        "backward of call"));
  EXPECT_EQ(message_from(step), "nothing");
}

RANKS_TEST(RanksFailures, ThreadsUsePipelinesInAnyOrder, 2) {
  Subject pipes[] = {Subject(ranks, "1f1b", Checkpoint::kNever, 2), Subject(ranks, "gpipe", Checkpoint::kNever, 2)};
  std::vector<std::jthread> threads;
  for (int k = 0; k < 2; ++k) {
    threads.emplace_back([&, k] {
      for (int step = 0; step < 3; ++step) {
        std::this_thread::sleep_for(milliseconds(k == ranks->rank() ? 0 : 200));
        EXPECT_EQ(message_from([&] { pipes[k].step(); }), "nothing");
      }
    });
  }
}

RANKS_TEST(RanksFailures, AHookThrows, kRanks) {
  Subject subject(ranks);
  const std::vector<std::function<void()>> calls = {[&] { subject.step(); }, [&] { subject.forward_and_backward(); }};
  for (int culprit = 0; culprit < kRanks; ++culprit) {
    for (const auto& call : calls) {
      SCOPED_TRACE(culprit);
      const auto parameter = subject.pipe->parameters()[1];
      const auto hook = parameter.register_hook([&](const Tensor& gradient) {
        if (ranks->rank() == culprit) throw std::runtime_error("a hook's");
        return gradient;
      });
      EXPECT_THAT(message_from(call), ranks->rank() == culprit ? HasSubstr("a hook's") : HasSubstr("nothing"));
      parameter.remove_hook(hook);
      EXPECT_THAT(message_from(call), HasSubstr("the last backward of rank " + std::to_string(culprit) +
                                                " ended with an exception, as of a hook, but that of rank "));
      EXPECT_EQ(message_from(call), "nothing");
    }
  }
}

RANKS_TEST(RanksFailures, ARefusedBatchIsRefusedByAll, kRanks) {
  Subject subject(ranks, "1f1b", Checkpoint::kAlways);
  const auto ones = torch::ones({8, 4});
  for (int culprit = 0; culprit < kRanks; ++culprit) {
    SCOPED_TRACE(culprit);
    const bool is_culprit = ranks->rank() == culprit;
    const auto expect_refused = [&](const std::function<void()>& call, const std::string& reason) {
      const auto told = "rank " + std::to_string(culprit) + " refused the call: ";
      EXPECT_THAT(message_from(call), HasSubstr(is_culprit ? reason : told));
    };
    expect_refused([&] { subject.pipe->forward(is_culprit ? torch::tensor(1.0) : ones); }, "dimension");
    if (is_culprit) subject.pipe->eval();
    expect_refused([&] { subject.step(); }, "training mode");
    subject.pipe->train();
    // Also what only the backward finds.
    auto input = ones.clone();
    auto output = subject.pipe->forward(input).sum();
    if (is_culprit) input.add_(1);
    expect_refused([&] { output.backward(); }, "changed in place");
    output = subject.pipe->forward(ones).sum();
    if (is_culprit) subject.pipe->parameters()[0].detach().add_(1);
    expect_refused([&] { output.backward(); }, "changed");
    for (const auto& parameter : subject.pipe->parameters()) EXPECT_FALSE(parameter.grad().defined());
  }
  EXPECT_EQ(message_from([&] { subject.step(); }), "nothing");
}

}  // namespace
}  // namespace gpipe
