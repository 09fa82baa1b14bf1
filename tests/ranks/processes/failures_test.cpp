// A rank that fails ends the call on all ranks, with the cause.
//
// Only a rank that stops or hangs is told by a time-out. The message says so.

#include <ATen/autocast_mode.h>
#include <gmock/gmock.h>
#include <torch/torch.h>

#include <csignal>
#include <iostream>
#include <optional>
#include <thread>

#include "tests/gpipe/helpers.h"
#include "tests/gpipe/instruments.h"
#include "tests/ranks/processes/job.h"

namespace gpipe {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::AllOf;
using ::testing::HasSubstr;

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
  void forward(std::int64_t batch = 8) { pipe->forward(torch::ones({batch, 4})); }
  void forward_and_backward() { pipe->forward(torch::ones({8, 4})).sum().backward(); }
  void step(std::int64_t batch = 8, const StepOptions& options = {}) { step(torch::ones({batch, 4}), options); }
  void step(const Tensor& x, const StepOptions& options = {}) {
    pipe->step(x, torch::ones_like(x),
               tensor_loss([](const Tensor& out, const Tensor& t) { return torch::mse_loss(out, t); }), options);
  }

  std::shared_ptr<FaultPlan> plan = std::make_shared<FaultPlan>();
  GPipe pipe{nullptr};
};

/// The message of the exception that the function throws; "nothing" if it throws none.
std::string message_from(const std::function<void()>& function) {
  try {
    function();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "nothing";
}

void expect_failed(const std::vector<End>& ends, int culprit, const std::string& cause) {
  for (int r = 0; r < kRanks; ++r) {
    if (r == culprit) continue;
    EXPECT_EQ(ends[r].status, 2) << "rank " << r << ":\n" << ends[r].output;
    EXPECT_THAT(ends[r].output, HasSubstr(cause)) << "rank " << r;
  }
}

struct Throwing {
  std::string name;
  FaultPlan::Where where;
  std::string schedule;  // empty: forward and backward
  Checkpoint checkpoint;
  std::string action;  // empty: any
  int stages = kRanks;
};

TEST(RanksFailures, ALayerThrows) {
  const std::vector<Throwing> cases = {
      {"forward", FaultPlan::kForward, "", Checkpoint::kNever, "F1"},
      {"backward", FaultPlan::kBackward, "", Checkpoint::kNever, "B2"},
      {"recompute", FaultPlan::kRecompute, "", Checkpoint::kAlways, "R2"},
      {"forward of 1f1b", FaultPlan::kForward, "1f1b", Checkpoint::kNever, "F1"},
      {"backward of 1f1b", FaultPlan::kBackward, "1f1b", Checkpoint::kNever, "B1"},
      {"forward of zb_h1", FaultPlan::kForward, "zb_h1", Checkpoint::kNever, "F1"},
      {"backward of zb_h1", FaultPlan::kBackward, "zb_h1", Checkpoint::kNever, "I1"},
      {"forward with two stages on each rank", FaultPlan::kForward, "1f1b", Checkpoint::kNever, "", 2 * kRanks},
      {"backward with two stages on each rank", FaultPlan::kBackward, "", Checkpoint::kNever, "", 2 * kRanks},
      {"backward of zb_v", FaultPlan::kBackward, "zb_v", Checkpoint::kNever, "", 2 * kRanks},
  };
  expect_job(kRanks, [&](const std::shared_ptr<Ranks>& first) {
    const int rank = first->rank();
    for (const auto& test : cases) {
      for (int culprit = 0; culprit < kRanks; ++culprit) {
        SCOPED_TRACE(test.name + " on rank " + std::to_string(culprit));
        const auto schedule = test.schedule.empty() ? "gpipe" : test.schedule;
        Subject subject(new_ranks(kRanks), schedule, test.checkpoint, test.stages);
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
  });
}

/// Trains until an error ends it.
void train(const std::shared_ptr<Ranks>& ranks, const std::function<void(Subject&)>& prepare) {
  Subject subject(ranks, "1f1b");
  prepare(subject);
  for (;;) {
    subject.step();
    subject.forward_and_backward();
    const torch::NoGradGuard no_grad;
    subject.forward();
  }
}

/// Kills one of three ranks at a random moment. The first ones while they train, later ones also while the ranks meet.
TEST(RanksFailures, ARankIsKilled) {
  repeat_job(number_of_kills(), [](int kill) {
    const int culprit = kill % kRanks;
    const bool early = kill % 10 > 6;
    const auto ends =
        run_job(kRanks,
                [&](const std::shared_ptr<Ranks>& ranks) {
                  const auto kill_later = [&] {
                    const std::chrono::microseconds delay(kill * 102947 % (early ? 50000 : 200000));
                    if (ranks->rank() == culprit) kill_after(delay);
                  };
                  if (early) kill_later();
                  train(ranks, [&](Subject&) {
                    if (!early) kill_later();
                  });
                },
                {.ranks = early ? RanksOptions().timeout(seconds(4)).join_timeout(seconds(4)) : patient()});
    EXPECT_EQ(ends[culprit].status, -SIGKILL);
    expect_failed(ends, culprit, "rank " + std::to_string(culprit) + (early ? "" : " was lost"));
    for (int r = 0; r < kRanks; ++r) {
      if (r == culprit) continue;
      std::cout << "rank " << r << " ended " << ends[r].seconds - ends[culprit].seconds << " s after rank " << culprit
                << (early ? " (early)" : "") << ": " << ends[r].output;
    }
  });
}

TEST(RanksFailures, ARankIsKilledBeforeThePipelineIsMade) {
  const auto ends = run_job(kRanks,
                            [](const std::shared_ptr<Ranks>& ranks) {
                              if (ranks->rank() == 1) raise(SIGKILL);
                              Subject subject(ranks);
                            },
                            {.ranks = patient().join_timeout(seconds(4))});
  expect_failed(ends, 1, "rank 1 of 3 did not come within 4.0 s");
}

TEST(RanksFailures, ARankIsKilledBetweenTwoPipelines) {
  const auto ends = run_job(kRanks,
                            [](const std::shared_ptr<Ranks>& ranks) {
                              Subject one(ranks);
                              one.step();
                              if (ranks->rank() == 2) raise(SIGKILL);
                              Subject two(ranks);
                            },
                            {.ranks = patient(), .limit = seconds(60)});
  expect_failed(ends, 2, "rank 2 was lost");
}

TEST(RanksFailures, ARankIsStopped) {
  repeat_job(2, [](int number) {
    const int culprit = 2 * number;
    const auto ends = run_job(kRanks,
                              [&](const std::shared_ptr<Ranks>& ranks) {
                                train(ranks, [&](Subject& subject) {
                                  if (ranks->rank() == culprit)
                                    subject.arm(FaultPlan::kForward, [] { raise(SIGSTOP); });
                                });
                              },
                              {.ranks = patient().timeout(seconds(4)), .limit = seconds(60)});
    EXPECT_EQ(ends[culprit].status, -SIGKILL);  // by the test, which finds it stopped
    expect_failed(ends, culprit, "rank " + std::to_string(culprit) + " is stopped or cut off: rank ");
  });
}

TEST(RanksFailures, ALayerHangs) {
  expect_job(kRanks, [](const std::shared_ptr<Ranks>& first) {
    const int rank = first->rank();
    for (const int culprit : {1, 2}) {
      SCOPED_TRACE("rank " + std::to_string(culprit));
      Subject subject(new_ranks(kRanks, patient().timeout(seconds(4))), "1f1b");
      subject.step();
      if (rank == culprit) subject.arm(FaultPlan::kForward, [] { std::this_thread::sleep_for(seconds(10)); });
      const auto stage = std::to_string(culprit);
      EXPECT_THAT(message_from([&] { subject.step(); }),
                  HasSubstr("rank " + stage + " did not answer in time, it runs " + stage + "F1 (stage " + stage));
    }
  });
}

TEST(RanksFailures, ARankNeverComes) {
  const auto ends = run_job(kRanks, [](const std::shared_ptr<Ranks>& ranks) { Subject subject(ranks); },
                            {.ranks = patient().join_timeout(seconds(4)),
                             .before =
                                 [](int rank) {
                                   if (rank == 1) std::_Exit(0);
                                 },
                             .limit = seconds(60)});
  expect_failed(ends, 1, "rank 1 of 3 did not come within 4.0 s");
}

TEST(RanksFailures, ALateRankIsAwaited) {
  expect_job(kRanks, [](const std::shared_ptr<Ranks>& ranks) { Subject(ranks).step(); },
             {.before = [](int rank) { std::this_thread::sleep_for(rank * milliseconds(500)); }});
}

TEST(RanksFailures, RanksDisagree) {
  struct Case {
    std::function<void(GPipeOptions&, Balance&, Sequential&)> change;  // on rank 1
    std::string name, value, changed;
  };
  const std::vector<Case> cases = {
      {[](auto&, auto& balance, auto&) {
         balance = {1, 1, 2};
       },
       "the balance", "[1, 2, 1]", "[1, 1, 2]"},
      {[](auto& options, auto&, auto&) { options.chunks(3); }, "chunks", "2", "3"},
      {[](auto& options, auto&, auto&) { options.schedule("1f1b"); }, "the schedule", "gpipe", "1f1b"},
      {[](auto& options, auto&, auto&) { options.checkpoint(Checkpoint::kAlways); }, "the checkpoint mode",
       "except_last", "always"},
      {[](auto&, auto&, auto& model) { model = Sequential(Linear(4, 4), Linear(4, 4), Linear(4, 5), Linear(5, 4)); },
       "layer 2", "weight Float[4, 4]", "weight Float[5, 4]"},
      {[](auto&, auto&, auto& model) { model->parameters()[4].requires_grad_(false); }, "layer 2", "weight Float[4, 4]",
       "weight Float[4, 4] frozen"},
      {[](auto&, auto&, auto& model) {
         const torch::NoGradGuard no_grad;
         model->parameters()[3].zero_();
       },
       "the initial values of layer 1 (give all ranks the same seed)", "the hash", "the hash"},
      {[](auto&, auto& balance, auto& model) {
         model->push_back(torch::nn::ReLU());
         balance = {1, 2, 2};
       },
       "the balance", "[1, 2, 1]", "[1, 2, 2]"},
  };
  expect_job(kRanks, [&](const std::shared_ptr<Ranks>& first) {
    for (const auto& test : cases) {
      SCOPED_TRACE(test.name + " " + test.changed);
      const auto ranks = new_ranks(kRanks);
      GPipeOptions options = GPipeOptions().chunks(2).ranks(ranks);
      Balance balance = {1, 2, 1};
      torch::manual_seed(1);
      Sequential model(Linear(4, 4), Linear(4, 4), Linear(4, 4), Linear(4, 4));
      if (first->rank() == 1) test.change(options, balance, model);
      EXPECT_THAT(message_from([&] { GPipe(model, balance, options); }),
                  AllOf(HasSubstr("the ranks differ in " + test.name + ": rank 0 has"), HasSubstr(test.value),
                        HasSubstr("but rank 1 has"), HasSubstr(test.changed)));
    }
  });
}

TEST(RanksFailures, ARankCannotMakeItsPipeline) {
  expect_job(kRanks,
             [](const std::shared_ptr<Ranks>& ranks) {
               const auto message = message_from([&] {
                 const auto job = new_ranks(kRanks);
                 GPipe(Sequential(Linear(4, 4), Linear(4, 4), Linear(4, 4)), Balance{1, 1, ranks->rank() == 1 ? 2 : 1},
                       GPipeOptions().ranks(job));
               });
               EXPECT_THAT(message,
                           ranks->rank() == 1 ? HasSubstr("balance") : HasSubstr("rank 1 ended with an exception"));
             },
             {.ranks = patient(), .limit = seconds(60)});
}

TEST(RanksFailures, CallsDiffer) {
  expect_job(
      kRanks,
      [](const std::shared_ptr<Ranks>& ranks) {
        Subject subject(ranks);
        const auto on = [&](int rank, const std::function<void()>& one, const std::function<void()>& other) {
          return message_from(ranks->rank() == rank ? one : other);
        };
        const auto step = [&] { subject.step(); };
        const auto forward = [&] { subject.forward(); };
        EXPECT_THAT(on(2, step, forward), HasSubstr("rank 2 calls step of micro-batches [2, 2, 2, 2], checkpoint never,"
                                                    " but rank 0 calls forward with gradients of micro-batches"));
        EXPECT_THAT(on(0, step, forward), HasSubstr("rank 1 calls forward with gradients of micro-batches"));
        EXPECT_THAT(
            on(
                1, [&] { subject.step(6); }, step),
            HasSubstr("rank 1 calls step of micro-batches [2, 2, 2], checkpoint never, but rank 0 calls step of "
                      "micro-batches [2, 2, 2, 2]"));
        const auto without_gradients = [&] {
          const torch::NoGradGuard no_grad;
          subject.forward();
        };
        EXPECT_THAT(on(0, without_gradients, forward), HasSubstr("but rank 0 calls forward of micro-batches"));
        const auto with_autocast = [&] {
          at::autocast::set_autocast_enabled(at::kCUDA, true);
          forward();
        };
        EXPECT_THAT(on(2, with_autocast, forward), HasSubstr("checkpoint never, autocast of cuda to Half, but rank 0"));
        at::autocast::set_autocast_enabled(at::kCUDA, false);
        const auto scaled = [&](double scale) { subject.step(8, StepOptions().scale(scale)); };
        EXPECT_THAT(on(
                        1, [&] { scaled(65536.001); }, [&] { scaled(65536); }),
                    HasSubstr("step scaled by 65536 of"));
        // One rank leaves its backward out, and makes the next call.
        const auto output = subject.pipe->forward(torch::ones({8, 4})).sum();
        EXPECT_THAT(on(1, step, [&] { output.backward(); }),
                    HasSubstr("rank 1 calls step of micro-batches [2, 2, 2, 2], checkpoint never, but rank 0 calls the "
                              "backward of call"));
        EXPECT_EQ(message_from(step), "nothing");
      },
      {.ranks = patient(), .limit = seconds(60)});
}

TEST(RanksFailures, AHookThrows) {
  expect_job(kRanks, [](const std::shared_ptr<Ranks>& ranks) {
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
    const auto hook = subject.pipe->parameters()[1].register_hook(
        [](const Tensor&) -> Tensor { throw std::runtime_error("a hook of all ranks"); });
    EXPECT_THAT(message_from(calls[0]), HasSubstr("a hook of all ranks"));
    subject.pipe->parameters()[1].remove_hook(hook);
    EXPECT_EQ(message_from(calls[0]), "nothing");
  });
}

TEST(RanksFailures, ARankLeavesOutAMiniBatch) {
  expect_job(kRanks, [](const std::shared_ptr<Ranks>& ranks) {
    const auto x = [](int step) { return torch::full({8, 4}, 1.0 + step); };
    Subject subject(ranks);
    for (int step = 0; step < 3; ++step) subject.step(x(step));
    const bool is_late = ranks->rank() == 2;
    EXPECT_THAT(message_from([&] { subject.step(x(is_late ? 4 : 3)); }),
                HasSubstr("rank 2 trains on another mini-batch than rank 0, but had the same in the calls before"));
    // Only rank 0 reads the input.
    Subject other(new_ranks(kRanks));
    for (int step = 0; step < 5; ++step) other.step(x(ranks->rank() == 0 ? step : -1));
  });
}

TEST(RanksFailures, ARefusedBatchIsRefusedByAll) {
  expect_job(kRanks,
             [](const std::shared_ptr<Ranks>& ranks) {
               Subject subject(ranks, "1f1b", Checkpoint::kAlways);
               for (int culprit = 0; culprit < kRanks; ++culprit) {
                 SCOPED_TRACE(culprit);
                 const bool is_culprit = ranks->rank() == culprit;
                 const auto refused = "rank " + std::to_string(culprit) + " refused the call: ";
                 const auto parameters = copies(subject.pipe->parameters());
                 const auto batch = is_culprit ? torch::tensor(1.0) : torch::ones({8, 4});
                 EXPECT_THAT(message_from([&] { subject.pipe->forward(batch); }),
                             is_culprit ? HasSubstr("dimension") : HasSubstr(refused));
                 if (is_culprit) subject.pipe->eval();
                 EXPECT_THAT(message_from([&] { subject.step(); }),
                             is_culprit ? HasSubstr("training mode") : HasSubstr(refused));
                 subject.pipe->train();
                 // Also what only the backward finds.
                 auto input = torch::ones({8, 4});
                 auto output = subject.pipe->forward(input).sum();
                 if (is_culprit) input.add_(1);
                 EXPECT_THAT(message_from([&] { output.backward(); }),
                             is_culprit ? HasSubstr("changed in place") : HasSubstr(refused));
                 output = subject.pipe->forward(torch::ones({8, 4})).sum();
                 if (is_culprit) {
                   const torch::NoGradGuard no_grad;
                   subject.pipe->parameters()[0].add_(1);
                 }
                 EXPECT_THAT(message_from([&] { output.backward(); }),
                             is_culprit ? HasSubstr("changed") : HasSubstr(refused));
                 for (const auto& parameter : subject.pipe->parameters()) EXPECT_FALSE(parameter.grad().defined());
               }
               EXPECT_EQ(message_from([&] { subject.step(); }), "nothing");
             },
             {.ranks = patient(), .limit = seconds(60)});
}

TEST(RanksFailures, ARankLeavesItsLoopEarly) {
  const auto ends = run_job(kRanks,
                            [](const std::shared_ptr<Ranks>& ranks) {
                              Subject subject(ranks, "zb_h1");
                              for (int i = 0; i < (ranks->rank() == 1 ? 2 : 3); ++i) subject.step();
                            },
                            {.ranks = patient(), .limit = seconds(60)});
  EXPECT_EQ(ends[1].status, 0) << ends[1].output;
  expect_failed(ends, 1, "rank 1 has destroyed its pipeline");
}

TEST(RanksFailures, AnExceptionOfTheProgramEndsTheOthers) {
  const auto ends = run_job(kRanks,
                            [](const std::shared_ptr<Ranks>& ranks) {
                              Subject subject(ranks);
                              for (;;) {
                                subject.step();
                                if (ranks->rank() == 1) throw std::runtime_error("no more data");
                              }
                            },
                            {.ranks = patient(), .limit = seconds(60)});
  EXPECT_EQ(ends[1].status, 2);
  EXPECT_THAT(ends[1].output, HasSubstr("no more data"));
  expect_failed(ends, 1, "rank 1 ended with an exception outside of the pipeline");
}

}  // namespace
}  // namespace gpipe
