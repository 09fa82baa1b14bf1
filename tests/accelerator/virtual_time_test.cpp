// What pipelines take on a machine with up to eight devices, in time and memory: see virtual_time.h. The figures are exact.
#include "tests/accelerator/virtual_time.h"

#include "balance/profiler.h"
#include "balance/stage_cost.h"
#include "gpipe/schedules.h"
#include "gpipe/simulator.h"
#include "models/unet.h"
#include "tests/accelerator/device.h"
#include "tests/gpipe/layers.h"
#include "tests/schedule/programs.h"

namespace gpipe {
namespace {

using accelerator::device;
using accelerator::Log;
using accelerator::Machine;
using accelerator::Replay;
using accelerator::replay;
using accelerator::stream_order;

constexpr int kRows = 16;     // of a micro-batch
constexpr int kWidth = 32;    // of a layer
constexpr int kHidden = 512;  // matrices of 64 KiB are large: their gradients are added up one by one

/// A machine on which operators take so long that the host runs ahead: a tensor of 2 KiB stands for one of 40 MiB, and
/// a product over 4 channels for one over 64.
const Machine kBusy{.product_rate = 50e12 / 16, .scale = 2e4};

const LossFunction kLoss =
    tensor_loss([](const Tensor& out, const Tensor&) { return torch::mse_loss(out, out.detach()); });

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

/// Bottleneck blocks as of ResNet-50.
Sequential bottlenecks(int count, bool have_shortcuts) {
  Sequential layers;
  for (int i = 0; i < count; ++i) {
    if (have_shortcuts) layers->push_back(Stash(std::to_string(i), /*factor=*/1));
    for (const auto& [in, out, kernel] : {std::tuple(8, 4, 1), std::tuple(4, 4, 3), std::tuple(4, 8, 1)}) {
      layers->push_back(torch::nn::Conv2d(torch::nn::Conv2dOptions(in, out, kernel).padding(kernel / 2).bias(false)));
      layers->push_back(torch::nn::BatchNorm2d(out));
      layers->push_back(torch::nn::ReLU());
    }
    if (have_shortcuts) layers->push_back(Pop(std::to_string(i)));
  }
  return layers;
}

/// A pipeline of stages of about equally many layers, on the devices of its workers, and a step of it.
struct Equal {
  Equal(const Sequential& model, const Layout& layout, const std::string& schedule,
        const std::vector<std::int64_t>& shape = {kRows, kWidth})
      : pipe(model, shares(static_cast<std::int64_t>(model->size()), layout.stages),
             GPipeOptions()
                 .devices(devices(layout.workers()))
                 .placement(layout.placement)
                 .chunks(layout.micro_batches)
                 .schedule(schedule)
                 .checkpoint(Checkpoint::kNever)) {
    auto sizes = shape;
    sizes.front() *= layout.micro_batches;
    x = torch::ones(sizes, pipe->devices()[layout.placement.front()]);
    target = torch::zeros({sizes.front()}, pipe->devices()[layout.placement.back()]);
  }

  static Balance shares(std::int64_t layers, int stages) {
    Balance balance;
    for (int s = 0; s < stages; ++s) balance.push_back(layers * (s + 1) / stages - layers * s / stages);
    return balance;
  }

  Log step() {
    return log_of([&] { pipe->step(x, target, kLoss); });
  }

  GPipe pipe;
  Tensor x;
  Tensor target;
};

/// The seconds of each action and edge: as the devices took them, but at least `launch` for each of an action's
/// operators. Copies to a stage from one device are shared among the edges between them.
Costs costs_of(const Replay& run, const Program& program, double launch = 0) {
  const auto& layout = program.layout();
  const auto of = [](auto& stages, const Action& action) -> double& {
    return stages[action.stage][static_cast<std::size_t>(action.kind)];
  };
  Costs costs;
  costs.actions.resize(layout.stages);
  costs.edges.resize(program.edges().size());
  auto counts = costs.actions;
  auto launches = costs.actions;
  for (const auto& worker : program.schedule()) {
    for (const auto& action : worker) ++of(counts, action);
  }
  for (const auto& span : run.spans) {
    if (span.action.empty()) continue;
    const auto action = testing::action(span.action);
    const double seconds = (span.end - span.start) / of(counts, action);
    of(launches, action) += launch / of(counts, action);
    if (!span.is_copy) of(costs.actions, action) += seconds;
    if (!span.is_copy || action.kind != Kind::F) continue;
    std::vector<double*> edges;
    for (std::size_t e = 0; e < costs.edges.size(); ++e) {
      const auto& [from, to, skip] = program.edges()[e];
      if (to == action.stage && layout.placement[from] == span.device) edges.push_back(&costs.edges[e]);
    }
    for (auto* edge : edges) *edge += seconds / static_cast<double>(edges.size());
  }
  for (std::size_t s = 0; s < costs.actions.size(); ++s) {
    std::ranges::transform(costs.actions[s], launches[s], costs.actions[s].begin(), std::ranges::max);
  }
  costs.sending = costs.edges;
  return costs;
}

// The allocator reserves at most 1.03 times what the simulator says that cells and gradients take.
TEST(VirtualMemory, OfAScheduleThatBoundsItsCellsIsTheSameForAnyNumberOfMicroBatches) {
  constexpr int kBlocks = 4;
  const std::vector<std::pair<int, std::vector<int>>> cases = {{2, {4, 16, 64}}, {4, {8, 16, 64}}, {8, {16, 64}}};
  for (const auto& [workers, numbers] : cases) {
    const auto of_model =
        profile(wide_blocks(workers * kBlocks), torch::ones({kRows, kWidth}), ProfileOptions().seconds(0).repeats(1));
    std::vector<std::int64_t> before;
    for (const int micro_batches : numbers) {
      SCOPED_TRACE(std::to_string(workers) + " workers, " + std::to_string(micro_batches) + " micro-batches");
      Equal it(wide_blocks(workers * kBlocks), testing::straight(workers, micro_batches), "1f1b");
      const auto run = replay(log_of([&] {
                                it.pipe->zero_grad();
                                it.pipe->step(it.x, it.target, kLoss);
                              }),
                              kBusy);
      std::vector<std::int64_t> reserved;
      for (const auto& [device, bytes] : run.reserved) reserved.push_back(bytes);
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

/// A model of 16 blocks or layers, and the shape of its micro-batches.
struct Model {
  std::string name;
  Sequential (*make)();
  std::vector<std::int64_t> shape;
};
const std::vector<Model> kModels = {
    {"linears", [] { return linears(16); }, {kRows, kWidth}},
    {"U-Net", [] { return models::unet(models::UNetOptions().depth(2).base_channels(4)); }, {2, 3, 8, 8}},
    {"ResNet", [] { return bottlenecks(16, /*have_shortcuts=*/true); }, {2, 8, 4, 4}}};

// All schedules on four devices. The costs are the devices' own. Where the host is slower than the devices, they are the
// launches'.
TEST(VirtualTime, OfAStepIsWhatItsProgramTakes) {
  for (const auto& model : kModels) {
    testing::for_each_shape(4, 2, {8}, [&](const std::string& schedule, const Layout& layout) {
      if (layout.workers() != 4 || !too_few_stages(schedule, layout.placement).empty()) return;
      const bool fits_loops = schedule_rule(schedule).misfit(testing::looped(4, 2, 8)).empty();
      if (fits_loops && layout.placement == v_placement(8)) return;
      SCOPED_TRACE(model.name);
      Equal it(model.make(), layout, schedule, model.shape);
      const auto program = it.pipe->program(layout.micro_batches);
      const auto log = it.step();
      for (const auto& machine : {kBusy, Machine()}) {
        const auto run = replay(log, machine);
        const double device = simulate(*program, costs_of(run, *program)).makespan;
        const double host = simulate(*program, costs_of(run, *program, machine.launch)).makespan;
        if (machine.scale > 1) {
          EXPECT_GT(run.seconds, 0.95 * device);
          EXPECT_LT(run.seconds, (model.name == "U-Net" ? 1.04 : 1.02) * device);
        } else {
          EXPECT_GT(run.host_seconds, 0.99 * run.seconds) << "the host is slower";
          EXPECT_GT(host, 2.8 * device);
          EXPECT_NEAR(run.seconds / host, 1, 0.06);
        }
      }
    });
  }
}

// As many blocks as ResNet-50 has, on two devices. All cells are recomputed, which saves and restores running statistics by
// a few kernels, not by one per buffer.
TEST(Kernels, OfThePipelineItselfAreFew) {
  constexpr int kMicroBatches = 2;
  const auto layers = bottlenecks(16, /*have_shortcuts=*/false);
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
  const Balance balance(2, static_cast<std::int64_t>(layers->size()) / 2);
  GPipe pipe(layers, balance, GPipeOptions().devices(devices(2)).chunks(kMicroBatches).checkpoint(Checkpoint::kAlways));
  const auto target = x.to(device(1));
  const auto piped = kernels_of([&] { pipe->step(x, target, kMse); });
  RecordProperty("share", std::to_string(1 - static_cast<double>(plain) / static_cast<double>(piped)));
  EXPECT_LE(static_cast<double>(piped - plain), 0.03 * static_cast<double>(piped)) << piped << " and " << plain;
}

}  // namespace
}  // namespace gpipe
