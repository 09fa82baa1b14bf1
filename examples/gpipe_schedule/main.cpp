#include <CLI/CLI.hpp>
#include <cstdio>
#include <exception>
#include <initializer_list>
#include <iostream>
#include <nlohmann/json.hpp>
#include <numeric>
#include <stdexcept>
#include <string>

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "examples/gpipe_schedule/case.h"
#include "gpipe/drawing.h"
#include "gpipe/schedule/capacity.h"
#include "gpipe/schedule/schedule_text.h"
#include "gpipe/schedules.h"
#include "gpipe/simulator.h"

namespace gpipe::examples {
namespace {

std::string describe(const Edge& edge) { return absl::StrFormat("%s, stage %d to %d", edge.name, edge.from, edge.to); }

void print(const CaseOptions& options) { std::cout << to_text(make_case(options).schedule); }

void draw(const CaseOptions& options) {
  const auto made = make_case(options);
  std::cout << to_svg(simulate(verified(made), costs_of(made, options)).timeline);
}

void verify(const CaseOptions& options) {
  const auto made = make_case(options);
  const auto program = verified(made);
  std::cout << absl::StrFormat("The schedule runs: %d actions, %d workers, %d stages, %d micro-batches.\n",
                               std::accumulate(made.schedule.begin(), made.schedule.end(), std::size_t{0},
                                               [](std::size_t sum, const auto& list) { return sum + list.size(); }),
                               program.workers(), made.layout.stages, made.layout.micro_batches);
  const auto least = least_capacities(made.layout, made.edges, made.schedule);
  for (std::size_t e = 0; e < made.edges.size(); ++e) {
    std::cout << absl::StrFormat("%s: capacity %d, least %d\n", describe(made.edges[e]), made.edges[e].capacity,
                                 least[e]);
  }
}

nlohmann::ordered_json to_json(const Case& made, const Simulation& simulation) {
  nlohmann::ordered_json json;
  json["workers"] = simulation.timeline.workers;
  json["stages"] = made.layout.stages;
  json["micro_batches"] = made.layout.micro_batches;
  json["makespan"] = simulation.makespan;
  json["bubble"] = simulation.bubble;
  json["peak_cells"] = simulation.peak_cells;
  json["peak_bytes"] = simulation.timeline.peak_bytes();
  const auto least = least_capacities(made.layout, made.edges, made.schedule);
  auto& edges = json["edges"] = nlohmann::ordered_json::array();
  for (std::size_t e = 0; e < made.edges.size(); ++e) {
    const auto& edge = made.edges[e];
    edges.push_back({{"name", edge.name},
                     {"from", edge.from},
                     {"to", edge.to},
                     {"capacity", edge.capacity},
                     {"least_capacity", least[e]}});
  }
  return json;
}

void simulate(const CaseOptions& options, bool as_json) {
  const auto made = make_case(options);
  const auto simulation = simulate(verified(made), costs_of(made, options));
  if (as_json) {
    std::cout << to_json(made, simulation).dump(2) << "\n";
    return;
  }
  const auto bytes = simulation.timeline.peak_bytes();
  std::cout << absl::StrFormat("makespan %g s, bubble %.1f %%\n", simulation.makespan, 100 * simulation.bubble);
  std::cout << "worker  peak cells  peak bytes\n";
  for (int w = 0; w < simulation.timeline.workers; ++w) {
    std::cout << absl::StrFormat("%6d  %10d  %10d\n", w, simulation.peak_cells[w], bytes[w]);
  }
}

std::string names() {
  return "schedules:\n" + absl::StrJoin(schedule_rules(), "\n", [](std::string* out, const ScheduleRule& rule) {
           absl::StrAppendFormat(out, "  %-18s %s", std::string(rule.name), std::string(rule.summary));
         });
}

void add_layout(CLI::App& verb, CaseOptions& options) {
  constexpr int kMost = 1 << 16;
  verb.add_option("schedule", options.schedule, "a schedule's name, or @FILE with one line of actions per worker")
      ->required();
  verb.add_option("--workers", options.workers, "number of workers")
      ->check(CLI::Range(1, kMost))
      ->capture_default_str();
  verb.add_option("--stages", options.stages, "number of stages; default: one per worker, two in a V")
      ->check(CLI::Range(1, kMost));
  verb.add_option(
      "--placement", options.placement,
      "looped, v, or the worker of each stage, such as 0,1,1,0, instead of --workers and --stages; default: "
      "the schedule's own");
  verb.add_option("--chunks", options.chunks, "number of micro-batches")
      ->check(CLI::Range(1, kMost))
      ->capture_default_str();
  verb.add_option("--checkpoint", options.checkpoint, "micro-batches to recompute: never, except_last or always")
      ->check(CLI::IsMember({"never", "except_last", "always"}))
      ->capture_default_str();
}

void add_edges(CLI::App& verb, CaseOptions& options) {
  verb.add_option("--skip", options.skips, "a skip connection FROM:TO between stages; can be repeated");
  verb.add_option("--capacity", options.capacity,
                  "micro-batches that each edge can hold; default: enough for any order")
      ->check(CLI::Range(1, 1 << 16));
}

void add_costs(CLI::App& verb, CaseOptions& options) {
  const auto positive = CLI::Range(1e-9, 1e9);
  verb.add_option("--forward", options.forward, "seconds of a stage's forward")->check(positive)->capture_default_str();
  verb.add_option("--backward", options.backward, "seconds of a stage's backward")
      ->check(positive)
      ->capture_default_str();
  verb.add_option("--input-gradient", options.input_gradient, "seconds of an I; default: half of --backward")
      ->check(positive);
  verb.add_option("--weight-gradient", options.weight_gradient, "seconds of a W; default: half of --backward")
      ->check(positive);
  const auto bytes = CLI::Range(std::int64_t{0}, std::int64_t{1} << 50);
  verb.add_option("--graph-bytes", options.graph_bytes, "bytes of a cell's graph, held until B or W")->check(bytes);
  verb.add_option("--input-bytes", options.input_bytes, "bytes that a recomputed cell stores")->check(bytes);
}

/// A file has a layout of its own, and a list of workers has numbers of its own.
void check_layout_is_used(const CLI::App& verb, const CaseOptions& options) {
  const auto refuse = [&](std::initializer_list<const char*> flags, const std::string& why) {
    for (const char* flag : flags) {
      if (verb.count(flag) > 0) throw std::invalid_argument(std::string(flag) + " does not apply to " + why);
    }
  };
  if (options.schedule.starts_with('@')) {
    refuse({"--workers", "--stages", "--placement", "--chunks", "--checkpoint"}, "a schedule from a file");
  } else if (!options.placement.empty() && options.placement != "looped" && options.placement != "v") {
    refuse({"--workers", "--stages"}, "a list of workers as --placement");
  }
}

int run(int argc, char** argv) {
  CLI::App app("Prints, draws, verifies and simulates pipeline schedules.", "gpipe-schedule");
  app.require_subcommand(1);
  app.footer(names());
  CaseOptions options;
  bool as_json = false;
  auto* print_verb = app.add_subcommand("print", "write the lists of actions, one line per worker");
  auto* draw_verb = app.add_subcommand("draw", "write an SVG drawing");
  auto* verify_verb = app.add_subcommand("verify", "check that the schedule runs; write the least capacities");
  auto* simulate_verb = app.add_subcommand("simulate", "write makespan, bubble, peak cells and bytes");
  for (auto* verb : {print_verb, draw_verb, verify_verb, simulate_verb}) {
    add_layout(*verb, options);
    verb->footer(names());
    if (verb != print_verb) add_edges(*verb, options);
  }
  for (auto* verb : {draw_verb, simulate_verb}) add_costs(*verb, options);
  simulate_verb->add_flag("--json", as_json, "write JSON, with the least capacity of each edge");
  try {
    app.parse(argc, argv);
    check_layout_is_used(*app.get_subcommands().front(), options);
    if (print_verb->parsed()) print(options);
    if (draw_verb->parsed()) draw(options);
    if (verify_verb->parsed()) verify(options);
    if (simulate_verb->parsed()) simulate(options, as_json);
  } catch (const CLI::ParseError& error) {
    return app.exit(error);
  } catch (const std::exception& error) {
    std::cerr << "gpipe-schedule: " << error.what() << "\n";
    return 1;
  }
  std::cout.flush();
  if (!std::cout) {
    std::cerr << "gpipe-schedule: cannot write the output\n";
    return 1;
  }
  return 0;
}

}  // namespace
}  // namespace gpipe::examples

int main(int argc, char** argv) { return gpipe::examples::run(argc, argv); }
