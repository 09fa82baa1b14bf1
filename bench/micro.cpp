// Costs of single parts: scatter and gather of mini-batches, a hand-over between threads, a program with empty cells,
// the interpreter of graphs, the verifier and the simulator on large programs, and balances of large models.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/add.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/zeros.h>
#include <benchmark/benchmark.h>

#include <array>
#include <cstdint>
#include <numeric>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "balance/cut.h"
#include "gpipe/graph/graph.h"
#include "gpipe/run/step_input.h"
#include "gpipe/runtime/executor.h"
#include "gpipe/schedule/verifier.h"
#include "gpipe/schedules.h"
#include "gpipe/simulator.h"

namespace gpipe {
namespace {

using benchmark::kMicrosecond;
using benchmark::kMillisecond;
using benchmark::State;

/// Reports the seconds per part of an iteration that has `count` parts.
void report(State& state, const std::string& part, double count) {
  using benchmark::Counter;
  state.counters["s/" + part] = Counter(count, Counter::kIsIterationInvariantRate | Counter::kInvert);
}

/// A mini-batch with 4 rows per micro-batch, and the sizes of its micro-batches.
std::pair<at::Tensor, std::vector<std::int64_t>> mini_batch(const State& state) {
  const auto rows = 4 * state.range(0);
  return {at::zeros({rows, state.range(1)}), micro_batch_sizes(rows, state.range(0), 0)};
}

void scatter(State& state) {
  const auto [input, sizes] = mini_batch(state);
  for (auto _ : state) benchmark::DoNotOptimize(gpipe::scatter(input, sizes));
  report(state, "part", static_cast<double>(sizes.size()));
}

void gather(State& state) {
  const auto [input, sizes] = mini_batch(state);
  const auto parts = gpipe::scatter(input, sizes);
  for (auto _ : state) benchmark::DoNotOptimize(gpipe::gather(parts, sizes, "last"));
  report(state, "part", static_cast<double>(sizes.size()));
  state.SetBytesProcessed(state.iterations() * static_cast<std::int64_t>(input.nbytes()));
}

BENCHMARK(scatter)->ArgNames({"m", "width"})->ArgsProduct({{8, 32}, {8, 1 << 14}})->Unit(kMicrosecond);
BENCHMARK(gather)->ArgNames({"m", "width"})->ArgsProduct({{8, 32}, {8, 1 << 14}})->Unit(kMicrosecond);

/// Hands over to another thread and back.
void hand_over(State& state) {
  const int count = static_cast<int>(state.max_iterations);
  Channel there(count);
  Channel back(count);
  std::thread other([&] {
    for (int m = 0; m < count; ++m) {
      there.take(m);
      back.put(m);
    }
  });
  int m = 0;
  for (auto _ : state) {
    there.put(m);
    back.take(m++);
  }
  other.join();
  report(state, "hand-over", 2);
}

BENCHMARK(hand_over)->Unit(kMicrosecond)->UseRealTime();

struct NoActions : ActionRunner {
  void on_worker(int, absl::FunctionRef<void()> run_actions) override { run_actions(); }
  void run(const Action&, Measure) override {}
};

/// The parts of a program with one stage per worker, an activation between any two neighbours, and `skips` skips: from
/// the first stage to the last, from the second to the second-last, and so on.
struct Parts {
  Parts(int stages, int micro_batches, int skips, Checkpoint checkpoint) : layout{stages, micro_batches, {}} {
    layout.placement.resize(stages);
    std::iota(layout.placement.begin(), layout.placement.end(), 0);
    for (int s = 0; s + 1 < stages; ++s) edges.push_back({s, s + 1, "activation"});
    for (int s = 0; s < skips; ++s) edges.push_back({s, stages - 1 - s, "skip"});
    schedule = fill_drain(layout, checkpoint);
  }

  Program program() const { return Program::make(layout, edges, schedule); }

  Layout layout;
  std::vector<Edge> edges;
  Schedule schedule;
};

void empty_program(State& state) {
  const int workers = static_cast<int>(state.range(0));
  const int micro_batches = static_cast<int>(state.range(1));
  const auto program = Parts(workers, micro_batches, 0, Checkpoint::kNever).program();
  Executor executor(workers);
  NoActions actions;
  for (auto _ : state) executor.run(program, Part::kAll, actions);
  report(state, "action", 2.0 * workers * micro_batches);
}

BENCHMARK(empty_program)
    ->ArgNames({"workers", "m"})
    ->ArgsProduct({{2, 4}, {1, 8, 32}})
    ->Unit(kMicrosecond)
    ->UseRealTime();

constexpr int kOperators = 100;

/// A chain of operators. The first argument of each is the result before it; `more` follows.
void graph(State& state, const std::string& name, const std::string& more) {
  std::string calls;
  for (int i = 0; i < kOperators; ++i) {
    calls += (i == 0 ? "" : ", ") + (R"({"operator": ")" + name) + R"(", "args": [{"value": )" + std::to_string(i) +
             "}" + more + R"(], "result": )" + std::to_string(i + 1) + "}";
  }
  const Graph chain(R"({"values": 101, "inputs": [0], "outputs": [{"value": 100}], "calls": [)" + calls + "]}");
  const auto x = at::zeros(8);
  for (auto _ : state) benchmark::DoNotOptimize(chain.run({x}, {}));
  report(state, "operator", kOperators);
}

/// The same without the interpreter.
template <typename Operator>
void direct(State& state, Operator compute) {
  const auto x = at::zeros(8);
  for (auto _ : state) {
    auto value = x;
    for (int i = 0; i < kOperators; ++i) value = compute(value, x);
    benchmark::DoNotOptimize(value);
  }
  report(state, "operator", kOperators);
}

BENCHMARK_CAPTURE(graph, relu, "aten::relu", "")->Unit(kMicrosecond);
BENCHMARK_CAPTURE(direct, relu, [](const at::Tensor& value, const at::Tensor&) {
  return at::relu(value);
})->Unit(kMicrosecond);
BENCHMARK_CAPTURE(graph, add, "aten::add.Tensor", R"(, {"value": 0})")->Unit(kMicrosecond);
BENCHMARK_CAPTURE(direct, add, [](const at::Tensor& value, const at::Tensor& x) {
  return at::add(value, x);
})->Unit(kMicrosecond);

Parts large(const State& state) { return Parts(64, 1024, static_cast<int>(state.range(0)), Checkpoint::kAlways); }

void verify(State& state) {
  const auto parts = large(state);
  for (auto _ : state) benchmark::DoNotOptimize(gpipe::verify(parts.layout, parts.edges, parts.schedule));
}

void simulate(State& state) {
  const auto program = large(state).program();
  const Costs costs = {.actions = std::vector(program.layout().stages, std::array{1.0, 1.0, 2.0, 0.0, 0.0}),
                       .edges = std::vector(program.edges().size(), 0.1)};
  for (auto _ : state) benchmark::DoNotOptimize(gpipe::simulate(program, costs));
}

BENCHMARK(verify)->ArgName("skips")->Arg(0)->Arg(32)->Unit(kMillisecond);
BENCHMARK(simulate)->ArgName("skips")->Arg(0)->Arg(32)->Unit(kMillisecond);

/// 1,000 layers of different sizes. Each keeps its input for its backward. Every tenth stashes a skip for the layer 100
/// further on.
Profile large_profile() {
  constexpr int kLayers = 1000;
  Profile profile{.samples = 1, .device = "cpu"};
  for (int layer = 0; layer < kLayers; ++layer) {
    const double seconds = 0.001 * (1 + layer % 7);
    const std::int64_t bytes = 1000 * (1 + layer % 11);
    profile.layers.push_back({.forward = seconds,
                              .stored = seconds,
                              .recompute = seconds,
                              .backward = 2 * seconds,
                              .parameters = bytes,
                              .gradients = bytes,
                              .output = bytes,
                              .saved = bytes,
                              .shares_with = layer});
    if (layer + 1 < kLayers) profile.blocks.push_back({bytes, Kind::F, layer, Kind::B, layer + 1, layer + 1});
    if (layer % 10 == 0 && layer + 100 < kLayers) {
      profile.skips.push_back({"skip", layer, {layer + 100}, bytes});
      profile.blocks.push_back({bytes, Kind::F, layer, Kind::B, layer + 100, layer, {layer + 100}});
    }
  }
  return profile;
}

void cut_by_time(State& state) {
  const auto profile = large_profile();
  for (auto _ : state) benchmark::DoNotOptimize(balance_by_time(profile, 64, {.chunks = 8}));
}

void cut_by_size(State& state) {
  const auto profile = large_profile();
  const RunOptions run{.chunks = 8, .checkpoint = static_cast<Checkpoint>(state.range(0))};
  for (auto _ : state) benchmark::DoNotOptimize(balance_by_size(profile, 64, run));
}

BENCHMARK(cut_by_time)->Unit(kMillisecond);
BENCHMARK(cut_by_size)->ArgName("checkpoint")->DenseRange(0, 2)->Unit(kMillisecond);

}  // namespace
}  // namespace gpipe

int main(int argc, char** argv) {
  at::set_num_threads(1);
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::RunSpecifiedBenchmarks();
}
