// What pipelines take on a machine with four devices, in time and memory: see virtual_time.h. The figures are exact.
#include "tests/accelerator/virtual_time.h"

#include "gpipe/schedules.h"
#include "gpipe/simulator.h"
#include "tests/accelerator/device.h"
#include "tests/gpipe/helpers.h"
#include "tests/schedule/programs.h"

namespace gpipe {
namespace {

using accelerator::device;
using accelerator::DeviceSpan;
using accelerator::kDevices;
using accelerator::Log;
using accelerator::Machine;
using accelerator::Replay;
using accelerator::replay;
using accelerator::stream_order;

constexpr int kRows = 16;   // of a micro-batch
constexpr int kWidth = 32;  // of a layer
constexpr int kLayers = 2;  // of a stage

/// A machine on which operators take so long that the host runs ahead: a tensor of 2 KiB stands for one of 40 MiB.
const Machine kBusy{.scale = 2e4};

/// What a steady step asks for.
Log log_of(const std::function<void()>& step) {
  step();
  const auto names = accelerator::name_actions();
  stream_order().keep_log();
  step();
  return stream_order().take_log();
}

struct Deep {
  Deep(int workers, int stages, int micro_batches, const std::string& schedule)
      : pipe(model(stages), Balance(stages, kLayers),
             GPipeOptions()
                 .devices(devices(workers))
                 .stages_per_worker(stages / workers)
                 .chunks(micro_batches)
                 .schedule(schedule)
                 .checkpoint(Checkpoint::kNever)),
        x(torch::ones({micro_batches * kRows, kWidth}, device(0))),
        target(torch::zeros({micro_batches * kRows, kWidth}, pipe->devices().back())) {}

  static Sequential model(int stages) {
    Sequential layers;
    for (int i = 0; i < kLayers * stages; ++i) layers->push_back(Linear(kWidth, kWidth));
    return layers;
  }
  static std::vector<torch::Device> devices(int workers) {
    std::vector<torch::Device> devices;
    for (int w = 0; w < workers; ++w) devices.push_back(device(w));
    return devices;
  }
  Log step() {
    return log_of([&] { pipe->step(x, target, kMse); });
  }

  GPipe pipe;
  Tensor x;
  Tensor target;
};

TEST(VirtualMemory, OfAScheduleThatBoundsItsCellsIsTheSameForAnyNumberOfMicroBatches) {
  for (const int workers : {2, 4}) {
    std::vector<std::int64_t> before;
    for (const int micro_batches : {4, 12}) {
      const auto got = replay(Deep(workers, workers, micro_batches, "1f1b").step(), kBusy);
      std::vector<std::int64_t> reserved;
      for (const auto& [device, memory] : got.memory) reserved.push_back(memory.peak_reserved);
      ASSERT_EQ(reserved.size(), workers);
      if (!before.empty()) EXPECT_EQ(reserved, before) << "with " << workers << " workers";
      before = reserved;
    }
  }
}

/// The seconds of each action and edge, as the devices took them.
Costs costs_of(const Replay& run, const Program& program) {
  Costs costs;
  costs.actions.resize(program.layout().stages);
  costs.edges.resize(program.edges().size());
  std::map<std::pair<int, Kind>, int> counts;
  for (const auto& worker : program.schedule())
    for (const auto& action : worker) ++counts[{action.stage, action.kind}];
  for (const auto& span : run.spans) {
    if (span.action.empty()) continue;
    const auto action = testing::action(span.action);
    const double seconds = (span.end - span.start) / counts[{action.stage, action.kind}];
    if (!span.is_copy) {
      costs.actions[action.stage][static_cast<std::size_t>(action.kind)] += seconds;
    } else if (action.kind == Kind::F && action.stage > 0) {
      costs.edges[action.stage - 1] += seconds;
    }
  }
  costs.sending = costs.edges;
  return costs;
}

TEST(VirtualTime, OfAStepIsWhatItsProgramTakes) {
  constexpr int kMicroBatches = 8;
  for (const auto& rule : schedule_rules()) {
    for (const int stages : {2 * kDevices, kDevices}) {
      Layout layout{stages, kMicroBatches, {}};
      try {
        layout.placement = rule.place(stages, stages / kDevices);
      } catch (const std::invalid_argument&) {
        continue;
      }
      if (layout.workers() != kDevices || !rule.misfit(layout).empty()) continue;
      if (!too_few_stages(rule.name, layout.placement).empty()) continue;
      const auto program = testing::plain_program(layout, make_schedule(rule.name, layout, Checkpoint::kNever));
      const auto run = replay(Deep(kDevices, stages, kMicroBatches, std::string(rule.name)).step(), kBusy);
      const double expected = simulate(program, costs_of(run, program)).makespan;
      RecordProperty(std::string(rule.name) + std::to_string(stages), std::to_string(run.seconds / expected));
      EXPECT_LT(run.seconds, 1.02 * expected) << rule.name << " with " << stages << " stages";
      EXPECT_GT(run.seconds, 0.95 * expected) << rule.name << " with " << stages << " stages";
    }
  }
}

// A recomputed cell saves and restores running statistics: by a few kernels, not by one per buffer.
TEST(Kernels, ThatCopyBuffersAreAsManyForAnyNumberOfBatchNorms) {
  const auto copies = [](int norms) {
    Sequential layers(Linear(8, 8));
    for (int i = 0; i < norms; ++i) layers->push_back(torch::nn::BatchNorm1d(8));
    GPipe pipe(layers, Balance{norms + 1},
               GPipeOptions().devices({device(0)}).chunks(4).checkpoint(Checkpoint::kAlways));
    const auto x = torch::ones({16, 8}, device(0));
    const auto log = log_of([&] { pipe->step(x, torch::zeros({16, 8}, device(0)), kMse); });
    return std::ranges::count_if(replay(log, Machine()).spans, [](const DeviceSpan& span) {
      return span.operation.find("copy") != span.operation.npos;
    });
  };
  EXPECT_EQ(copies(2), copies(12));
}

TEST(VirtualTime, IsTheSameInEachRun) {
  const auto one = replay(Deep(4, 4, 4, "1f1b").step(), kBusy);
  const auto two = replay(Deep(4, 4, 4, "1f1b").step(), kBusy);
  EXPECT_EQ(one.seconds, two.seconds);
  EXPECT_EQ(one.host_seconds, two.host_seconds);
  EXPECT_EQ(one.spans.size(), two.spans.size());
}

}  // namespace
}  // namespace gpipe
