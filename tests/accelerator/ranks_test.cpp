// Pipelines over ranks, on devices that check the order of streams. Two threads of this process are the ranks.
#include <gmock/gmock.h>

#include <mutex>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "gpipe/loss.h"
#include "gpipe/ranks/ranks.h"
#include "tests/accelerator/device.h"
#include "tests/gpipe/helpers.h"
#include "tests/gpipe/layers.h"

namespace gpipe {
namespace {

namespace nn = torch::nn;
using accelerator::device;
using accelerator::stream_order;

constexpr int kRanks = 2;
constexpr std::chrono::seconds kPatience{60};

/// The losses, the output and the gradients, on the CPU.
using Results = std::vector<Tensor>;

/// A model and a mini-batch, the same each time.
struct Training {
  Training() {
    static std::mutex mutex;  // the ranks are threads that share the default generator
    const std::lock_guard lock(mutex);
    torch::manual_seed(3);
    model = Sequential(Linear(6, 6), Stash("skip"), nn::ReLU(), Linear(6, 6), nn::Tanh(), Linear(6, 6), Pop("skip"),
                       Linear(6, 5));
    input = torch::randn({8, 6});
    target = torch::randn({8, 5});
  }

  Sequential model;
  Tensor input;
  Tensor target;
};

Results train(const std::string& schedule, Checkpoint checkpoint, const std::vector<torch::Device>& devices,
              const std::shared_ptr<Ranks>& ranks) {
  const auto [model, input, target] = Training();
  auto options = GPipeOptions().devices(devices).chunks(4).checkpoint(checkpoint).schedule(schedule).intraop_threads(1);
  GPipe pipe(model, Balance{2, 2, 2, 2}, options.stages_per_worker(2).ranks(ranks));
  Results results;
  for (int i = 0; i < 2; ++i) {
    const auto squared_error = tensor_loss([](auto output, auto wanted) { return (output - wanted).square().mean(); });
    results.push_back(pipe->step(input, target, squared_error).loss.cpu());
  }
  const auto output = pipe->forward(input);
  output.square().mean().backward();
  results.push_back(output.detach().cpu());
  for (const auto& parameter : pipe->parameters()) results.push_back(parameter.grad().cpu());
  return results;
}

void expect_equal(const Tensor& result, const Tensor& expected) {
  EXPECT_TRUE(torch::allclose(result, expected, /*rtol=*/1e-5, /*atol=*/1e-6));
}

class RanksOnDevices : public ::testing::TestWithParam<std::tuple<std::string, Checkpoint>> {};

TEST_P(RanksOnDevices, WorkIsOrdered) {
  const auto& [schedule, checkpoint] = GetParam();
  const auto expected = train(schedule, checkpoint, {torch::kCPU, torch::kCPU}, nullptr);
  const auto store = c10::make_intrusive<c10d::HashStore>();
  stream_order().take_violations();
  std::vector<Results> results(kRanks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank, schedule = schedule, checkpoint = checkpoint] {
      const auto options = RanksOptions().interface("lo").timeout(kPatience).join_timeout(kPatience);
      const auto ranks = std::make_shared<Ranks>(store, rank, kRanks, options);
      results[rank] = train(schedule, checkpoint, {device(rank)}, ranks);
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_THAT(stream_order().take_violations(), ::testing::IsEmpty());
  // Losses and output, on all ranks; then the gradients of stages 0 and 2 on rank 0, of 1 and 3 on rank 1.
  const std::vector<std::vector<int>> of_all = {{3, 4, 7, 8}, {5, 6, 9, 10}};
  for (int rank = 0; rank < kRanks; ++rank) {
    ASSERT_EQ(results[rank].size(), 3 + of_all[rank].size());
    for (int i = 0; i < 3; ++i) expect_equal(results[rank][i], expected[i]);
    for (std::size_t i = 0; i < of_all[rank].size(); ++i) expect_equal(results[rank][3 + i], expected[of_all[rank][i]]);
  }
}

INSTANTIATE_TEST_SUITE_P(Schedules, RanksOnDevices,
                         ::testing::Combine(::testing::Values("gpipe", "interleaved_1f1b", "interleaved_zb"),
                                            ::testing::Values(Checkpoint::kNever, Checkpoint::kExceptLast)),
                         [](const auto& info) {
                           return std::get<0>(info.param) + "_" + to_string(std::get<1>(info.param));
                         });

}  // namespace
}  // namespace gpipe
