// Over processes, sequences of calls leave the same outputs, gradients, buffers and random numbers as in one process.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "tests/gpipe/helpers.h"
#include "tests/gpipe/layers.h"
#include "tests/ranks/processes/job.h"

namespace gpipe {
namespace {

namespace nn = torch::nn;

const std::string kOfInput = "gradient of the input";  // only the first stage's rank has it

/// A pipeline and what its calls leave, by name.
struct Trial {
  GPipe pipe{nullptr};
  std::map<std::string, Tensor> record;
  int calls = 0;

  /// Notes results, and the state of this rank: gradients, parameters, buffers, the default generator.
  void note(const std::vector<Tensor>& results) {
    const auto call = "call " + std::to_string(calls++) + ": ";
    for (std::size_t i = 0; i < results.size(); ++i) add(call + "result " + std::to_string(i), results[i]);
    for (const auto& parameter : pipe->named_parameters()) {
      add(call + parameter.key(), parameter.value());
      add(call + "gradient of " + parameter.key(), parameter.value().grad());
    }
    for (const auto& buffer : pipe->named_buffers()) add(call + buffer.key(), buffer.value());
    add(call + "generator", generator_state());
  }
  void add(const std::string& name, const Tensor& tensor) {
    record[name] = tensor.defined() ? tensor.detach().clone() : Tensor();
  }
};

using Make = std::function<GPipe(std::shared_ptr<Ranks>)>;
using Calls = std::function<void(Trial&)>;

/// Runs the calls over the ranks and in this process alone. Each rank must leave what the one process leaves.
void compare(const std::shared_ptr<Ranks>& ranks, const Make& make, const Calls& calls) {
  const auto run = [&](std::shared_ptr<Ranks> over) {
    torch::manual_seed(3);
    Trial trial{make(std::move(over)), {}};
    calls(trial);
    return trial;
  };
  const auto alone = run(nullptr);
  const auto over_ranks = run(ranks);
  EXPECT_EQ(over_ranks.calls, alone.calls);
  EXPECT_FALSE(over_ranks.pipe->named_parameters().is_empty());
  for (const auto& [name, tensor] : over_ranks.record) {
    const auto expected = alone.record.find(name);
    ASSERT_NE(expected, alone.record.end()) << name;
    EXPECT_TRUE(same(tensor, expected->second)) << name;
  }
  for (const auto& [name, tensor] : alone.record) {
    if (name == kOfInput) EXPECT_EQ(over_ranks.record.count(name), ranks->rank() == 0) << name;
  }
}

Tensor batch(std::int64_t samples) { return torch::arange(samples * 6, torch::kFloat).reshape({samples, 6}).sin(); }

void zero_gradients(GPipe& pipe) {
  for (auto& parameter : pipe->parameters()) parameter.mutable_grad() = Tensor();
}

void descend(GPipe& pipe) {
  const torch::NoGradGuard no_grad;
  for (auto& parameter : pipe->parameters()) {
    if (parameter.grad().defined()) parameter.sub_(parameter.grad(), 0.1);
  }
  zero_gradients(pipe);
}

const LossFunction kLoss = tensor_loss([](const Tensor& out, const Tensor& t) { return torch::mse_loss(out, t); });

Sequential model_with_state() {
  return Sequential(Linear(6, 6), nn::BatchNorm1d(6), Stash("a"), nn::Dropout(0.3), Linear(6, 6), nn::ReLU(), Pop("a"),
                    nn::BatchNorm1d(6), nn::Dropout(0.2), Linear(6, 6));
}

void train_and_evaluate(Trial& trial) {
  auto& pipe = trial.pipe;
  const auto evaluate = [&](std::int64_t samples) {
    const torch::NoGradGuard no_grad;
    pipe->eval();
    trial.note({pipe->forward(batch(samples))});
    pipe->train();
  };
  for (const std::int64_t samples : {9, 8, 6, 11}) {  // also with an uneven last micro-batch
    auto output = pipe->forward(batch(samples));
    output.sin().sum().backward();
    trial.note({output});
    descend(pipe);
    evaluate(samples + 1);
  }
  evaluate(1);
  for (const std::int64_t samples : {9, 12, 8}) {
    auto result = pipe->step(batch(samples), batch(samples).cos(), kLoss, StepOptions().return_output(true));
    trial.note({result.loss, result.output.tensor()});
    pipe->step(batch(samples), batch(samples).cos(), kLoss);  // accumulates
    trial.note({});
    descend(pipe);
    evaluate(samples);
  }
  {
    const torch::NoGradGuard no_grad;
    trial.note({pipe->forward(batch(9))});  // in training mode
  }
}

/// Several graphs at once, graphs that are used twice, and autograd's other entries.
void use_graphs(Trial& trial) {
  auto& pipe = trial.pipe;
  auto one = pipe->forward(batch(9));
  auto two = pipe->forward(batch(6));
  two.sum().backward();
  trial.note({one, two});
  (one * one).sum().backward();
  trial.note({});
  zero_gradients(pipe);

  auto kept = pipe->forward(batch(9));
  kept.sum().backward({}, /*retain_graph=*/true);
  trial.note({kept});
  kept.cos().sum().backward();
  trial.note({});
  zero_gradients(pipe);
  { auto dropped = pipe->forward(batch(9)); }  // without a backward

  auto loss = pipe->loss(batch(9), batch(9).cos(), kLoss);
  (2 * loss).backward();
  trial.note({loss});
  zero_gradients(pipe);

  auto output = pipe->forward(batch(9));
  auto gradients = torch::autograd::grad({output.sum()}, pipe->parameters(), {}, false, false, /*allow_unused=*/true);
  trial.note({output});
  std::size_t i = 0;
  for (const auto& parameter : pipe->named_parameters()) trial.add("grad of " + parameter.key(), gradients[i++]);

  auto x = batch(9).requires_grad_();
  pipe->forward(x).sum().backward();
  trial.note({});
  if (x.grad().defined()) trial.add(kOfInput, x.grad());

  pipe->to(torch::kDouble);  // other layouts
  pipe->step(batch(9).to(torch::kDouble), batch(9).to(torch::kDouble), kLoss);
  trial.note({});
}

TEST(RanksState, CallsLeaveWhatOneProcessLeaves) {
  expect_job(3, [](const std::shared_ptr<Ranks>& ranks) {
    for (const auto* schedule : {"gpipe", "1f1b", "zb_h1"}) {
      for (const auto checkpoint : kModes) {
        const bool deferred = checkpoint != Checkpoint::kExceptLast;
        SCOPED_TRACE(std::string(schedule) + ", checkpoint " + to_string(checkpoint));
        const Make make = [&](std::shared_ptr<Ranks> over) {
          return GPipe(model_with_state(), Balance{4, 3, 3},
                       GPipeOptions()
                           .chunks(3)
                           .schedule(schedule)
                           .checkpoint(checkpoint)
                           .deferred_batch_norm(deferred)
                           .ranks(std::move(over)));
        };
        compare(ranks, make, train_and_evaluate);
        compare(ranks, make, use_graphs);
      }
    }
  });
}

TEST(RanksState, FrozenParameters) {
  expect_job(3, [](const std::shared_ptr<Ranks>& ranks) {
    for (const auto* schedule : {"gpipe", "1f1b", "zb_h1"}) {
      for (int trained = -1; trained < 3; ++trained) {  // the only stage whose parameters want gradients; -1: none
        SCOPED_TRACE(std::string(schedule) + ", only stage " + std::to_string(trained) + " is trained");
        compare(
            ranks,
            [&](std::shared_ptr<Ranks> over) {
              auto model = Sequential(Linear(6, 6), nn::Tanh(), Linear(6, 6), nn::Tanh(), Linear(6, 6));
              for (int stage = 0; stage < 3; ++stage) {
                for (auto& parameter : model->ptr(2 * stage)->parameters()) parameter.requires_grad_(stage == trained);
              }
              return GPipe(model, Balance{2, 2, 1}, GPipeOptions().chunks(3).schedule(schedule).ranks(std::move(over)));
            },
            [&](Trial& trial) {
              auto output = trial.pipe->forward(batch(7));
              EXPECT_EQ(output.requires_grad(), trained >= 0);
              if (trained >= 0) output.sum().backward();
              trial.note({output});
              trial.note({trial.pipe->step(batch(7), batch(7), kLoss).loss});
              auto x = batch(7).requires_grad_();
              trial.pipe->forward(x).sum().backward();
              trial.note({});
              if (x.grad().defined()) trial.add(kOfInput, x.grad());
            });
      }
    }
  });
}

/// Gives and takes several tensors, of several types and shapes, and undefined ones.
struct SeveralImpl : nn::Module {
  explicit SeveralImpl(int place) : place(place), linear(register_module("linear", Linear(6, 6))) {}
  std::vector<Tensor> forward(std::vector<Tensor> in) {
    in[0] = linear(in[0]).tanh();
    in[1] = place == 1 ? Tensor() : in[0].detach() > 0;
    if (place == 1) in.push_back(in[0].t().contiguous().t() * 2);  // other strides
    if (place == 2) in[0] = in[0] + in[2];
    if (place == 2) in.push_back(Tensor());
    return in;
  }
  int place;
  Linear linear;
};
TORCH_MODULE(Several);

TEST(RanksState, SeveralTensors) {
  expect_job(3, [](const std::shared_ptr<Ranks>& ranks) {
    for (const auto checkpoint : kModes) {
      SCOPED_TRACE(to_string(checkpoint));
      compare(
          ranks,
          [&](std::shared_ptr<Ranks> over) {
            return GPipe(Sequential(Several(0), Several(1), Several(2)), Balance{1, 1, 1},
                         GPipeOptions().chunks(3).checkpoint(checkpoint).ranks(std::move(over)));
          },
          [](Trial& trial) {
            for (const std::int64_t samples : {7, 6}) {
              auto output = trial.pipe->forward(std::vector<Tensor>{batch(samples), batch(samples)});
              output[0].sum().backward();
              trial.note(output);
              zero_gradients(trial.pipe);
              auto loss = [](Value out, Value) { return out.tensors()[0].square().mean(); };
              trial.note(
                  {trial.pipe
                       ->step(Value(std::vector<Tensor>{batch(samples), batch(samples)}), Value(batch(samples)), loss)
                       .loss});
              const torch::NoGradGuard no_grad;
              trial.note(trial.pipe->forward(std::vector<Tensor>{batch(samples), batch(samples)}));
            }
          });
    }
  });
}

}  // namespace
}  // namespace gpipe
