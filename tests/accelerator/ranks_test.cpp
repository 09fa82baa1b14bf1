// Pipelines over ranks, on devices that check the order of streams. Threads of this process are the ranks. Tensors pass
// through the host, or go by wires between the devices.

#include "absl/cleanup/cleanup.h"
#include "gpipe/schedules.h"
#include "tests/accelerator/device.h"
#include "tests/accelerator/ranks_training.h"
#include "tests/gpipe/instruments.h"
#include "tests/gpipe/layers.h"
#include "tests/schedule/programs.h"

namespace gpipe {
namespace {

using accelerator::CheckedWires;
using accelerator::device;
using accelerator::held;
using accelerator::stream_order;

class RanksOnDevices : public ::testing::TestWithParam<std::tuple<std::string, Checkpoint, Way>> {};

TEST_P(RanksOnDevices, WorkIsOrdered) {
  const auto& [schedule, checkpoint, way] = GetParam();
  const auto expected = train(schedule, checkpoint, {torch::kCPU, torch::kCPU}, nullptr);
  stream_order().take_violations();
  const auto results = train_over_ranks(schedule, checkpoint, way);
  EXPECT_THAT(stream_order().take_violations(), IsEmpty());
  // Losses and output, on all ranks; then the gradients of stages 0 and 2 on rank 0, of 3 on rank 1. Stage 1 has none.
  const std::vector<std::vector<int>> of_all = {{0, 1, 2, 3, 4, 5, 6}, {0, 1, 2, 7, 8}};
  for (std::size_t rank = 0; rank < results.size(); ++rank) {
    Results wanted;
    for (const int i : of_all[rank]) wanted.push_back(expected[i]);
    expect_close(results[rank], wanted, 1e-5, 1e-6);
  }
}

INSTANTIATE_TEST_SUITE_P(Schedules, RanksOnDevices,
                         ::testing::Combine(::testing::Values("gpipe", "interleaved_1f1b", "interleaved_zb"),
                                            ::testing::Values(Checkpoint::kNever, Checkpoint::kAlways),
                                            ::testing::Values(Way::kHost, Way::kWires)),
                         [](const auto& info) {
                           return std::get<0>(info.param) + "_" + to_string(std::get<1>(info.param)) +
                                  (std::get<2>(info.param) == Way::kHost ? "" : "_wires");
                         });

Sequential two_layers(const std::shared_ptr<FaultPlan>& faults = std::make_shared<FaultPlan>()) {
  Sequential model(Linear(4, 4), Linear(4, 4), Faulty(faults));
  const torch::NoGradGuard no_grad;
  for (auto& parameter : model->parameters()) parameter.fill_(0.5);
  return model;
}

GPipe pipe_on_devices(const std::shared_ptr<Ranks>& ranks, const Sequential& model) {
  return GPipe(model, Balance{1, 2}, GPipeOptions().devices({device(ranks->rank())}).chunks(2).ranks(ranks));
}

TEST(RanksOnDevicesByWires, ReplicasHaveWiresOfTheirOwn) {
  const auto step = [](GPipe& pipe, const Tensor& input) {
    pipe->step(input, input, kMse);
    return pipe->parameters().front().grad().cpu();
  };
  const auto whole = torch::arange(32).reshape({8, 4}) / 32;
  auto alone = GPipe(two_layers(), Balance{1, 2}, GPipeOptions().devices({torch::kCPU, torch::kCPU}).chunks(4));
  const auto expected = step(alone, whole);
  stream_order().take_violations();
  CheckedWires wires;
  std::vector<Tensor> gradients(4);
  const auto errors = run_ranks(4, patient_ranks().replicas(2), &wires, [&](const auto& ranks) {
    auto pipe = pipe_on_devices(ranks, two_layers());
    const auto [begin, end] = ranks->part(8);
    gradients[ranks->rank()] = step(pipe, whole.slice(0, begin, end));
  });
  ASSERT_THAT(errors, Each(IsEmpty()));
  EXPECT_THAT(stream_order().take_violations(), IsEmpty());
  for (const int rank : {0, 1}) expect_close({gradients[rank]}, {expected}, 1e-5, 1e-6);  // these have the first stage
}

// The devices stand still, so the first rank waits for its own when the last rank fails.
TEST(RanksOnDevicesByWires, AFailureRousesARankThatWaitsForItsDevice) {
  const absl::Cleanup release = [] { held() = false; };
  CheckedWires wires;
  const auto errors = run_ranks(2, patient_ranks(), &wires, [](const auto& ranks) {
    const auto faults = std::make_shared<FaultPlan>();
    auto pipe = pipe_on_devices(ranks, two_layers(faults));
    pipe->forward(torch::ones({4, 4}));
    faults->arm(FaultPlan::kForward, [calls = 0]() mutable {
      if (++calls == 2) throw std::runtime_error("the layer fails");
    });
    pipe->team().largest(0);  // all ranks have ended the first call
    held() = true;
    pipe->forward(torch::ones({4, 4}));
  });
  EXPECT_THAT(errors, ElementsAre(HasSubstr("a rank has failed: rank 1 failed"), HasSubstr("the layer fails")));
  EXPECT_FALSE(held());
  EXPECT_EQ(wires.aborted(), 2);
}

TEST(RanksOnDevicesByWires, ADeviceThatStandsStillIsReported) {
  const absl::Cleanup release = [] { held() = false; };
  CheckedWires wires;
  const auto errors = run_ranks(2, patient_ranks().timeout(std::chrono::seconds(1)), &wires, [](const auto& ranks) {
    auto pipe = pipe_on_devices(ranks, two_layers());
    pipe->forward(torch::ones({4, 4}));
    pipe->team().largest(0);  // all ranks have ended the first call
    held() = true;
    pipe->forward(torch::ones({4, 4}));
  });
  EXPECT_THAT(errors, Each(AllOf(HasSubstr("a rank has failed"), HasSubstr("waited for"))));
}

// A device runs one transfer at a time, and the hosts' launches take any time.
TEST(RanksOnDevicesByWires, NoScheduleMakesADeadlock) {
  const auto names = accelerator::name_actions();
  int programs = 0;
  testing::for_each_shape(4, 2, {4}, [&](const std::string& schedule, const Layout& layout) {
    const int size = layout.workers();
    if (size == 1 || layout.stages > 6 || !too_few_stages(schedule, layout.placement).empty()) return;
    const auto step = [&](const std::shared_ptr<Ranks>& ranks) {
      Sequential model(Stash("skip"), Linear(4, 4));
      for (int s = 2; s < layout.stages; ++s) model->push_back(Linear(4, 4));
      model->push_back(Pop("skip"));
      model->push_back(Linear(4, 4));
      Balance balance(layout.stages, 1);
      balance.front() = balance.back() = 2;
      const auto own = GPipeOptions().devices({device(ranks->rank())}).ranks(ranks);
      GPipe pipe(model, balance, GPipeOptions(own).chunks(4).schedule(schedule).placement(layout.placement));
      pipe->step(torch::ones({4, 4}), torch::ones({4, 4}), kMse);
    };
    CheckedWires wires;
    stream_order().keep_log();
    EXPECT_THAT(run_ranks(size, patient_ranks(), &wires, step), Each(IsEmpty()));
    const auto log = stream_order().take_log();
    for (std::uint64_t seed = 0; seed < 8; ++seed) EXPECT_NO_THROW(accelerator::replay(log, {.seed = seed})) << seed;
    ++programs;
  });
  EXPECT_GT(programs, 20);
}

TEST(RanksOnDevicesByWires, AWorkerElsewhereIsRefused) {
  CheckedWires wires;
  const auto errors = run_ranks(2, patient_ranks(), &wires, [](const auto& ranks) {
    const auto where = ranks->rank() == 0 ? device(0) : c10::Device(c10::kCPU);
    GPipe(two_layers(), Balance{1, 2}, GPipeOptions().devices({where}).ranks(ranks));
  });
  EXPECT_THAT(errors, ElementsAre(HasSubstr("rank 1 ended with an exception"),
                                  HasSubstr("but worker 1, of rank 1, is on cpu; give it another device")));
}

TEST(RanksOnDevicesByWires, RanksThatDifferAreTold) {
  CheckedWires wires;
  const auto errors = run_ranks(
      2, patient_ranks(), &wires, [](const auto& ranks) { pipe_on_devices(ranks, two_layers()); }, /*without_wires=*/1);
  EXPECT_THAT(errors, Each(HasSubstr("the ranks differ in nccl: rank 0 has true, but rank 1 has false")));
}

}  // namespace
}  // namespace gpipe
