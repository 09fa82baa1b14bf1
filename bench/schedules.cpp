// Compares step() under each schedule with its simulation: the time of a step and the peak bytes of the workers. The costs
// in the simulation come from other runs: times from traced steps, bytes from a profile of the model with its loss. Also
// runs the unpartitioned model with an intra-op thread per worker.

#include <torch/nn/modules/container/functional.h>
#include <torch/utils.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <iostream>
#include <map>

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "balance/cut.h"
#include "balance/profiler.h"
#include "balance/stage_cost.h"
#include "balance/trial.h"
#include "bench/measure.h"
#include "bench/subject.h"
#include "gpipe/gpipe.h"
#include "gpipe/simulator.h"

namespace gpipe::bench {
namespace {

constexpr int kWorkers = 2;
constexpr double kProfileSeconds = 2;

// The schedules to measure, with their stages per worker.
const std::vector<std::pair<std::string, int>> kSchedules = {
    {"gpipe", 1},  {"1f1b", 1},  {"looped_bfs", 2},     {"interleaved_1f1b", 2},
    {"zb_h1", 1},  {"zb_h2", 1}, {"interleaved_zb", 2}, {"zb_v", 2},
    {"v_half", 2}, {"v_min", 2}, {"dualpipe_v", 2},     {"greedy", 1}};

// What the measurements should show.
constexpr double kMostSeconds = 1.05;  // measured / simulated
constexpr double kMostBytes = 0.3;     // 1f1b's peak / gpipe's, with these chunks and this checkpoint mode
constexpr int kChunksOfMostBytes = 16;
constexpr Checkpoint kCheckpointOfMostBytes = Checkpoint::kNever;

// A pipeline under one schedule.
struct Contender {
  Row row;
  std::vector<CellBytes> bytes;  // per stage
  GPipe pipe{nullptr};
  std::vector<std::shared_ptr<Timeline>> traces;  // one per traced step

  void traced_step(const torch::Tensor& input) {
    pipe->trace(traces.emplace_back(std::make_shared<Timeline>()));
    step(pipe, input, row);
    pipe->trace(nullptr);
  }

  Simulation simulated() const {
    Timeline all{traces.front()->workers, traces.front()->edges, {}};
    for (const auto& trace : traces) all.spans.insert(all.spans.end(), trace->spans.begin(), trace->spans.end());
    auto costs = costs_of(all, row.stages);
    costs.bytes = bytes;
    return simulate(*pipe->program(row.chunks), costs);
  }

  // The peak bytes of the worker that has most, per traced step.
  std::vector<double> peaks() const {
    std::vector<double> peaks;
    for (const auto& trace : traces) peaks.push_back(largest(trace->peak_bytes()));
    return peaks;
  }

  // The same without the sums of the parameters' gradients.
  std::vector<double> peaks_of_cells() const {
    std::vector<double> peaks;
    for (const auto& trace : traces) peaks.push_back(peak_of_cells(*trace));
    return peaks;
  }

  static double largest(const std::vector<std::int64_t>& bytes) {
    return static_cast<double>(*std::max_element(bytes.begin(), bytes.end()));
  }

 private:
  // A stage's first backward allocates the sums. Its bytes are those before it.
  double peak_of_cells(const Timeline& trace) const {
    std::map<int, double> sums_since;  // by stage: the end of its first backward
    for (const auto& span : trace.spans) {
      if (span.action.kind != Kind::B && span.action.kind != Kind::W) continue;
      const auto [found, is_new] = sums_since.emplace(span.action.stage, span.end);
      if (!is_new) found->second = std::min(found->second, span.end);
    }
    std::int64_t peak = 0;
    for (const auto& span : trace.spans) {
      std::int64_t sums = 0;
      for (const auto& [stage, since] : sums_since) {
        if (pipe->placement()[stage] == span.worker && since <= span.start) sums += bytes[stage].parameters;
      }
      const bool first = span.end == sums_since.at(span.action.stage);
      peak = std::max(peak, (first ? span.bytes.before : span.bytes.peak) - sums);
    }
    return static_cast<double>(peak);
  }
};

// The model with the loss as one more layer, which cannot be cut off.
Profile profile_with_loss(const Subject& it) {
  torch::nn::Sequential whole;
  whole->extend(*it.model);
  whole->push_back(torch::nn::Functional([](const torch::Tensor& output) { return output.sum().view({1}); }));
  auto of_whole =
      profile(whole, it.input.narrow(0, 0, it.split_size), ProfileOptions().workers(kWorkers).seconds(kProfileSeconds));
  of_whole.layers.back().shares_with = static_cast<int>(of_whole.layers.size()) - 2;
  return of_whole;
}

Contender make_contender(const Subject& it, const Profile& of_whole, Row row, const std::string& schedule,
                         int stages_per_worker) {
  row.schedule = schedule;
  row.stages_per_worker = stages_per_worker;
  row.stages = kWorkers * row.stages_per_worker;
  const RunOptions run{.chunks = row.chunks, .checkpoint = row.checkpoint};
  auto balance = balance_by_time(of_whole, row.stages, run);
  Contender contender;
  contender.row = row;
  contender.bytes = StageCost(of_whole).costs(balance, run).bytes;
  --balance.back();  // the loss
  contender.pipe = make_pipe(it, balance, row);
  return contender;
}

// A step of the whole mini-batch without a pipeline and without checkpointing.
void step_on_threads(Subject& it, int threads) {
  torch::set_num_threads(threads);
  step(it.model, it.input);
  torch::set_num_threads(1);
}

// Prints a table of all rows, and whether they are within the limits.
class Report {
 public:
  Report() {
    add({"model", "stages", "chunks", "checkpoint", "schedule", "ms", "simulated", "time / simulated (min, max)",
         "speed / gpipe's (min, max)", "simulated", "two intra-op threads / gpipe's (min, max)", "MiB", "simulated",
         "MiB / simulated", "MiB / gpipe's (without gradients)"});
    lines_.push_back(std::vector<std::string>(lines_.front().size(), "---"));
  }

  // `threads`: the speed of the unpartitioned model. `of_gpipe`: for 1f1b, the peaks relative to those of gpipe, with and
  // without gradients.
  void add(const Contender& contender, const std::vector<double>& seconds, const Simulation& simulated,
           const Measurement& time, const Measurement& speed, const Measurement& threads, const Measurement& bytes,
           const std::vector<Measurement>& of_gpipe) {
    const auto& row = contender.row;
    const auto range = [](const std::vector<double>& values) {
      const auto [low, high] = std::minmax_element(values.begin(), values.end());
      return absl::StrFormat("%.2f (%.2f, %.2f)", median(values), *low, *high);
    };
    add({row.model, std::to_string(row.stages), std::to_string(row.chunks), to_string(row.checkpoint), row.schedule,
         absl::StrFormat("%.4g", median(seconds) * 1e3), absl::StrFormat("%.4g", simulated.makespan * 1e3),
         range(time.values), range(speed.values), absl::StrFormat("%.2f", speed.bound.value_or(1)),
         range(threads.values), mebibytes(median(contender.peaks())),
         mebibytes(Contender::largest(simulated.timeline.peak_bytes())), absl::StrFormat("%.2f", median(bytes.values)),
         of_gpipe.empty() ? ""
                          : absl::StrFormat("%.2f (%.2f)", median(of_gpipe[0].values), median(of_gpipe[1].values))});
    times_.push_back(time);
    if (!of_gpipe.empty() && of_gpipe[0].limit) peaks_.push_back(of_gpipe[0]);
  }

  void print() const {
    std::cout << "\n";
    for (const auto& cells : lines_) std::cout << "| " << absl::StrJoin(cells, " | ") << " |\n";
    std::cout << "\n";
    print_limit("Time / simulated", times_);
    print_limit("Peak of 1f1b / peak of gpipe, of the worker that has most", peaks_);
  }

 private:
  static std::string mebibytes(double bytes) { return absl::StrFormat("%.4g", bytes / (1 << 20)); }

  void add(std::vector<std::string> cells) { lines_.push_back(std::move(cells)); }

  static void print_limit(const std::string& name, const std::vector<Measurement>& rows) {
    if (rows.empty()) return;
    std::vector<double> values;
    for (const auto& row : rows) values.push_back(median(row.values));
    const auto passed = std::count_if(rows.begin(), rows.end(), [](const auto& row) { return row.passes(); });
    const double limit = *rows.front().limit;
    std::cout << absl::StrFormat("%s: median of the rows %.3f, at most %g: %s; largest %.3f; %d of %d rows pass\n",
                                 name, median(values), limit, median(values) <= limit ? "passes" : "fails",
                                 *std::max_element(values.begin(), values.end()), passed, rows.size());
  }

  std::vector<std::vector<std::string>> lines_;
  std::vector<Measurement> times_;
  std::vector<Measurement> peaks_;
};

// Counted / simulated, per traced step and worker.
std::vector<double> byte_ratios(const Contender& contender, const Simulation& simulated) {
  const auto expected = simulated.timeline.peak_bytes();
  std::vector<double> ratios;
  for (const auto& trace : contender.traces) {
    const auto counted = trace->peak_bytes();
    for (int w = 0; w < kWorkers; ++w) {
      ratios.push_back(static_cast<double>(counted[w]) / static_cast<double>(expected[w]));
    }
  }
  return ratios;
}

// Runs a step and a traced step of each schedule in turn.
void measure(const Row& row, const std::vector<std::string>& chosen, const Options& options, Report& report) {
  auto it = subject(row.model, row.chunks);
  const auto of_whole = profile_with_loss(it);
  std::vector<Contender> contenders;
  for (const auto& [name, stages_per_worker] : kSchedules) {
    if (std::find(chosen.begin(), chosen.end(), name) == chosen.end()) continue;
    contenders.push_back(make_contender(it, of_whole, row, name, stages_per_worker));
  }
  std::vector<std::function<void()>> steps;
  for (auto& each : contenders) {
    step(each.pipe, it.input, each.row);
    steps.emplace_back([&] { step(each.pipe, it.input, each.row); });
    steps.emplace_back([&] { each.traced_step(it.input); });
  }
  steps.emplace_back([&] { step_on_threads(it, kWorkers); });
  const auto times = interleave(steps, options.repeats);
  const Measurement threads{.bench = "schedules",
                            .row = row,
                            .unit = "times the speed of " + contenders.front().row.schedule +
                                    ", of the unpartitioned model on two intra-op threads",
                            .values = quotients(times.front(), times.back())};
  print(std::cout, threads);
  const Contender* gpipe = nullptr;
  double simulated_gpipe = 0;
  for (std::size_t i = 0; i < contenders.size(); ++i) {
    auto& each = contenders[i];
    each.traces.erase(each.traces.begin());  // the warm-up of interleave()
    const auto& seconds = times[2 * i];
    const auto simulated = each.simulated();
    const std::vector<double> makespans(seconds.size(), simulated.makespan);
    const Measurement time{.bench = "schedules",
                           .row = each.row,
                           .unit = "times the simulated seconds",
                           .values = quotients(seconds, makespans),
                           .limit = kMostSeconds};
    if (i == 0) simulated_gpipe = simulated.makespan;
    const Measurement speed{.bench = "schedules",
                            .row = each.row,
                            .unit = "times the speed of " + contenders.front().row.schedule,
                            .values = quotients(times[0], seconds),
                            .bound = simulated_gpipe / simulated.makespan};
    const Measurement bytes{"schedules", each.row, "times the simulated peak bytes (per worker)",
                            byte_ratios(each, simulated)};
    std::vector<Measurement> of_gpipe;
    if (each.row.schedule == "gpipe") gpipe = &each;
    if (each.row.schedule == "1f1b" && gpipe != nullptr) {
      const std::string unit = "times gpipe's peak bytes (of the worker that has most)";
      of_gpipe = {{"schedules", each.row, unit, quotients(each.peaks(), gpipe->peaks())},
                  {"schedules", each.row, unit + ", without gradients of parameters",
                   quotients(each.peaks_of_cells(), gpipe->peaks_of_cells())}};
      const bool limited = row.chunks == kChunksOfMostBytes && row.checkpoint == kCheckpointOfMostBytes;
      if (limited) of_gpipe[0].limit = kMostBytes;
    }
    print(std::cout, time);
    print(std::cout, speed);
    print(std::cout, bytes);
    for (const auto& line : of_gpipe) print(std::cout, line);
    report.add(each, seconds, simulated, time, speed, threads, bytes, of_gpipe);
  }
}

}  // namespace
}  // namespace gpipe::bench

int main(int argc, char** argv) {
  using namespace gpipe::bench;
  CLI::App app("Measured time and bytes of step() under each schedule, relative to the simulation. Two workers.");
  Options options{.models = kPeerSubjects,
                  .chunks = {4, 8, 16},
                  .checkpoints = {gpipe::Checkpoint::kNever, gpipe::Checkpoint::kAlways},
                  .repeats = 5};
  std::vector<std::string> schedules;
  for (const auto& [name, stages_per_worker] : kSchedules) schedules.push_back(name);
  add_flags(app, options);
  add_model_flag(app, options);
  app.add_option("--schedule", schedules, "schedules to run")->check(CLI::IsMember(schedules));
  return run_program(app, argc, argv, [&] {
    Report report;
    for_each_row(options, [&](const Row& row) { measure(row, schedules, options, report); });
    report.print();
  });
}
