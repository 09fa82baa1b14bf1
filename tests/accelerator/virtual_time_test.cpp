// What pipelines take on a machine with up to eight devices, in time and memory: see virtual_time.h. The figures are exact.
#include "tests/accelerator/virtual_time.h"

#include <cstdlib>
#include <fstream>

#include "balance/profiler.h"
#include "balance/stage_cost.h"
#include "gpipe/schedules.h"
#include "gpipe/simulator.h"
#include "tests/accelerator/device.h"
#include "tests/gpipe/helpers.h"
#include "tests/schedule/programs.h"

namespace gpipe {
namespace {

using accelerator::device;
using accelerator::DeviceSpan;
using accelerator::Log;
using accelerator::Machine;
using accelerator::Replay;
using accelerator::replay;
using accelerator::stream_order;

constexpr int kRows = 16;     // of a micro-batch
constexpr int kWidth = 32;    // of a layer
constexpr int kHidden = 512;  // matrices of 64 KiB are large: their gradients are added up one by one

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

std::vector<torch::Device> devices(int count) {
  std::vector<torch::Device> devices;
  for (int d = 0; d < count; ++d) devices.push_back(device(d));
  return devices;
}

Sequential linears(int count) {
  Sequential layers;
  for (int i = 0; i < count; ++i) layers->push_back(Linear(kWidth, kWidth));
  return layers;
}

/// Blocks as of a transformer: what a cell keeps is far larger than what it sends.
Sequential wide_blocks(int count) {
  Sequential layers;
  for (int i = 0; i < count; ++i) {
    layers->push_back(Linear(kWidth, kHidden));
    layers->push_back(torch::nn::GELU());
    layers->push_back(Linear(kHidden, kWidth));
  }
  return layers;
}

/// A pipeline of stages of equally many layers, on the devices of its workers, and a step of it.
struct Equal {
  Equal(const Sequential& model, const Layout& layout, const std::string& schedule)
      : pipe(model, Balance(layout.stages, static_cast<std::int64_t>(model->size()) / layout.stages),
             GPipeOptions()
                 .devices(devices(layout.workers()))
                 .placement(layout.placement)
                 .chunks(layout.micro_batches)
                 .schedule(schedule)
                 .checkpoint(Checkpoint::kNever)),
        x(torch::ones({layout.micro_batches * kRows, kWidth}, pipe->devices()[layout.placement.front()])),
        target(torch::zeros_like(x, pipe->devices()[layout.placement.back()])) {}

  Log step() {
    return log_of([&] { pipe->step(x, target, kMse); });
  }

  GPipe pipe;
  Tensor x;
  Tensor target;
};

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

// The allocator reserves at most 1.03 times what the simulator says that cells and gradients take.
TEST(VirtualMemory, OfAScheduleThatBoundsItsCellsIsTheSameForAnyNumberOfMicroBatches) {
  constexpr int kBlocks = 4;
  const std::vector<std::pair<int, std::vector<int>>> cases = {{2, {4, 64}}, {4, {8, 16}}, {8, {16}}};
  for (const auto& [workers, numbers] : cases) {
    const auto of_model =
        profile(wide_blocks(workers * kBlocks), torch::ones({kRows, kWidth}), ProfileOptions().seconds(0).repeats(1));
    std::vector<std::int64_t> before;
    for (const int micro_batches : numbers) {
      SCOPED_TRACE(std::to_string(workers) + " workers, " + std::to_string(micro_batches) + " micro-batches");
      Equal it(wide_blocks(workers * kBlocks), testing::straight(workers, micro_batches), "1f1b");
      const auto run = replay(log_of([&] {
                                it.pipe->zero_grad();
                                it.pipe->step(it.x, it.target, kMse);
                              }),
                              kBusy);
      std::vector<std::int64_t> reserved;
      for (const auto& [device, memory] : run.memory) reserved.push_back(memory.peak_reserved);
      if (!before.empty()) EXPECT_EQ(reserved, before);
      before = reserved;
      const auto program = it.pipe->program(micro_batches);
      auto costs = costs_of(run, *program);
      const RunOptions options{.chunks = micro_batches,
                               .checkpoint = Checkpoint::kNever,
                               .copies = true,
                               .scheduling = {.schedule = "1f1b"}};
      costs.bytes = StageCost(of_model).costs(it.pipe->balance(), options).bytes;
      const auto peaks = simulate(*program, costs).timeline.peak_bytes();
      ASSERT_EQ(reserved.size(), peaks.size());
      for (int w = 0; w < workers; ++w) {
        EXPECT_LE(static_cast<double>(reserved[w]), 1.03 * kBusy.scale * static_cast<double>(peaks[w])) << w;
      }
    }
  }
}

TEST(VirtualTime, OfAStepIsWhatItsProgramTakes) {
  testing::for_each_shape(4, 2, {8}, [](const std::string& schedule, const Layout& layout) {
    if (layout.workers() != 4 || !too_few_stages(schedule, layout.placement).empty()) return;
    const bool fits_loops = schedule_rule(schedule).misfit(testing::looped(4, 2, 8)).empty();
    if (fits_loops && layout.placement == v_placement(8)) return;
    const auto program = testing::plain_program(layout, make_schedule(schedule, layout, Checkpoint::kNever));
    const auto run = replay(Equal(linears(2 * layout.stages), layout, schedule).step(), kBusy);
    const double expected = simulate(program, costs_of(run, program)).makespan;
    EXPECT_LT(run.seconds, 1.02 * expected);
    EXPECT_GT(run.seconds, 0.95 * expected);
  });
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

// As many blocks as ResNet-50 has, on two devices. All cells are recomputed.
TEST(Kernels, OfThePipelineItselfAreFew) {
  constexpr int kBlocks = 16;
  constexpr int kMicroBatches = 2;
  Sequential layers;
  for (int i = 0; i < kBlocks; ++i) {
    for (const auto& [in, out, kernel] : {std::tuple(8, 4, 1), std::tuple(4, 4, 3), std::tuple(4, 8, 1)}) {
      layers->push_back(torch::nn::Conv2d(torch::nn::Conv2dOptions(in, out, kernel).padding(kernel / 2).bias(false)));
      layers->push_back(torch::nn::BatchNorm2d(out));
      layers->push_back(torch::nn::ReLU());
    }
  }
  const auto kernels_of = [](const std::function<void()>& step) {
    return replay(log_of(step), Machine()).spans.size();
  };
  const auto x = torch::ones({2 * kMicroBatches, 8, 4, 4}, device(0));
  const auto model = std::dynamic_pointer_cast<torch::nn::SequentialImpl>(layers->clone(device(0)));
  const auto plain = kernels_of([&] {
    for (const auto& part : x.split(2)) {
      {
        const torch::NoGradGuard no_grad;
        model->forward(part);
      }
      (torch::mse_loss(model->forward(part), part) / kMicroBatches).backward();
    }
  });
  const Balance balance(2, 9 * kBlocks / 2);
  GPipe pipe(layers, balance, GPipeOptions().devices(devices(2)).chunks(kMicroBatches).checkpoint(Checkpoint::kAlways));
  const auto target = x.to(device(1));
  const auto piped = kernels_of([&] { pipe->step(x, target, kMse); });
  RecordProperty("share", std::to_string(1 - static_cast<double>(plain) / static_cast<double>(piped)));
  EXPECT_LE(static_cast<double>(piped - plain), 0.03 * static_cast<double>(piped)) << piped << " and " << plain;
}

// More micro-batches take what their kernels take: copies cost no time, except before the first and after the last one.
TEST(VirtualTime, OfCopiesBetweenDevicesIsHiddenByComputation) {
  const auto run = [](int micro_batches, double link_rate) {
    auto machine = kBusy;
    machine.link_rate = link_rate;
    return replay(Equal(linears(6), testing::straight(3, micro_batches), "gpipe").step(), machine);
  };
  const auto copying = run(8, 100e9);
  double seconds = 0;
  for (const auto& span : copying.spans) seconds += span.is_copy ? span.end - span.start : 0;
  EXPECT_GT(seconds, 0.1 * copying.seconds);
  const double more = run(16, 100e9).seconds - copying.seconds;
  const double without_copies = run(16, 1e15).seconds - run(8, 1e15).seconds;
  EXPECT_NEAR(more / without_copies, 1, 1e-3);
}

// The devices' workers enqueue their copies to and from the CPU, and go on.
TEST(HostWaits, OfAStageOnTheCpuAreItsOwn) {
  GPipe pipe(linears(3), Balance(3, 1),
             GPipeOptions().devices({device(0), torch::kCPU, device(1)}).chunks(8).schedule("1f1b"));
  const auto x = torch::ones({8 * kRows, kWidth}, device(0));
  const auto target = torch::zeros({8 * kRows, kWidth}, device(1));
  const auto names = accelerator::name_actions();
  for (int i = 0; i < 3; ++i) {
    stream_order().take_counts();
    pipe->step(x, target, kMse);
  }
  for (const auto& [action, count] : stream_order().take_counts()) {
    if (!action.starts_with("1")) EXPECT_EQ(count.host_waits, 0) << action;
  }
}

/// The actions on the devices, without copies. Worker w has device w.
Timeline timeline_of(const Replay& run, const Program& program) {
  Timeline timeline{.workers = program.workers(), .edges = program.edges(), .spans = {}};
  std::map<std::string, std::size_t> places;  // in spans, by action
  for (const auto& span : run.spans) {
    if (span.action.empty() || span.is_copy) continue;
    const auto [place, is_new] = places.try_emplace(span.action, timeline.spans.size());
    if (is_new) timeline.spans.push_back({span.device, testing::action(span.action), span.start, span.end});
    timeline.spans[place->second].end = span.end;
  }
  return timeline;
}

// With the variable GPIPE_TIMELINE, writes the timeline of docs/gpus.md there.
TEST(VirtualTime, IsATimelineOfTheProgramsActionsAndTheSameInEachRun) {
  const auto run = [] {
    Equal it(wide_blocks(4), testing::straight(4, 8), "1f1b");
    const auto program = it.pipe->program(8);
    const auto timeline = timeline_of(replay(it.step(), kBusy), *program);
    std::vector<std::vector<Action>> lists(4);
    for (const auto& span : timeline.spans) lists[span.worker].push_back(span.action);
    EXPECT_EQ(lists, program->schedule());
    return to_chrome_json(timeline);
  };
  const auto timeline = run();
  EXPECT_EQ(run(), timeline);
  if (const auto* file = std::getenv("GPIPE_TIMELINE")) std::ofstream(file) << timeline;
}

}  // namespace
}  // namespace gpipe
