#include "tests/accelerator/ranks_training.h"

#include <mutex>
#include <optional>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "gpipe/loss.h"
#include "tests/accelerator/device.h"
#include "tests/gpipe/layers.h"

namespace gpipe {
namespace {

namespace nn = torch::nn;
using accelerator::device;

constexpr std::chrono::seconds kPatience{60};

/// A model and a mini-batch, the same each time. The input itself goes to another stage.
struct Training {
  Training() {
    static std::mutex mutex;  // the ranks are threads that share the default generator
    const std::lock_guard lock(mutex);
    torch::manual_seed(3);
    const auto with_gaps = [](Tensor x) { return torch::cat({x, x}, 1).narrow(1, 0, 6); };
    model = Sequential(Stash("skip"), Linear(6, 6), nn::ReLU(), function_layer(with_gaps), nn::Tanh(), Linear(6, 6),
                       Pop("skip"), Linear(6, 5));
    input = torch::randn({8, 6});
    target = torch::randn({8, 5});
  }

  Sequential model;
  Tensor input;
  Tensor target;
};

// Two stages: nothing comes back to the first one that tells that the input was sent.
void evaluate(const std::vector<torch::Device>& devices, const std::shared_ptr<Ranks>& ranks) {
  auto [model, input, target] = Training();
  input = input.to(devices.front());
  GPipe pipe(model, Balance{4, 4}, GPipeOptions().devices(devices).chunks(4).intraop_threads(1).ranks(ranks));
  const torch::NoGradGuard no_grad;
  pipe->forward(input);
  input.mul_(2);
}

}  // namespace

RanksOptions patient_ranks() { return RanksOptions().interface("lo").timeout(kPatience).join_timeout(kPatience); }

std::vector<std::string> run_ranks(int size, const std::function<void(const std::shared_ptr<Ranks>&)>& run,
                                   const RanksOptions& options, accelerator::CheckedWires* wires) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::string> errors(size);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        auto with = options;
        const auto ranks = std::make_shared<Ranks>(store, rank, size, with.nccl(wires != nullptr),
                                                   wires ? wires->connect() : ConnectDevices());
        run(ranks);
      } catch (const std::exception& error) {
        errors[rank] = error.what();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  return errors;
}

Results train(const std::string& schedule, Checkpoint checkpoint, const std::vector<torch::Device>& devices,
              const std::shared_ptr<Ranks>& ranks) {
  auto [model, input, target] = Training();
  input = input.to(devices.front());
  auto options = GPipeOptions().devices(devices).chunks(4).checkpoint(checkpoint).schedule(schedule).intraop_threads(1);
  GPipe pipe(model, Balance{2, 2, 2, 2}, options.stages_per_worker(2).ranks(ranks));
  torch::optim::SGD sgd(pipe->parameters(), 0.01);
  Results results;
  for (int i = 0; i < 2; ++i) {
    const auto squared_error = tensor_loss([](auto output, auto wanted) { return (output - wanted).square().mean(); });
    results.push_back(pipe->step(input, target, squared_error).loss.cpu());
    input.mul_(2);
    sgd.step();
  }
  const auto output = pipe->forward(input);
  output.square().mean().backward();
  results.push_back(output.detach().cpu());
  for (const auto& parameter : pipe->parameters()) results.push_back(parameter.grad().cpu());
  evaluate(devices, ranks);
  return results;
}

std::vector<Results> train_over_ranks(const std::string& schedule, Checkpoint checkpoint, Way way) {
  constexpr int kRanks = 2;
  accelerator::CheckedWires wires;
  std::vector<Results> results(kRanks);
  const auto errors = run_ranks(
      kRanks,
      [&](const auto& ranks) { results[ranks->rank()] = train(schedule, checkpoint, {device(ranks->rank())}, ranks); },
      patient_ranks(), way == Way::kWires ? &wires : nullptr);
  EXPECT_THAT(errors, ::testing::Each(::testing::IsEmpty()));
  return results;
}

}  // namespace gpipe
