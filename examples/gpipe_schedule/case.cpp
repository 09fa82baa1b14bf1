#include "examples/gpipe_schedule/case.h"

#include <cstdio>
#include <stdexcept>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "gpipe/schedule/capacity.h"
#include "gpipe/schedule/schedule_source.h"
#include "gpipe/schedule/verifier.h"
#include "gpipe/schedules.h"

namespace gpipe::examples {
namespace {

Case parse_file(const std::string& path) {
  auto parsed = read_schedule(path);
  return {std::move(parsed.layout), std::move(parsed.schedule), {}};
}

/// Whether the rule places two stages on each worker, in a V.
bool makes_v(const ScheduleRule& rule, int workers) { return rule.place(2 * workers, 1) == v_placement(2 * workers); }

std::vector<int> looped(const CaseOptions& options) {
  const int stages = options.stages == 0 ? options.workers : options.stages;
  if (stages < options.workers) {
    throw std::invalid_argument(
        absl::StrFormat("--stages is %d, but --workers is %d; give each worker a stage", stages, options.workers));
  }
  return looped_placement(options.workers, stages);
}

std::vector<int> v(const CaseOptions& options) {
  if (options.stages != 0 && options.stages != 2 * options.workers) {
    throw std::invalid_argument(absl::StrFormat(
        "--stages is %d, but a V has two stages on each worker, and --workers is %d; leave --stages out",
        options.stages, options.workers));
  }
  return v_placement(2 * options.workers);
}

std::vector<int> listed(const CaseOptions& options) {
  std::vector<int> placement;
  for (const auto worker : absl::StrSplit(options.placement, ',')) {
    if (!absl::SimpleAtoi(worker, &placement.emplace_back())) {
      throw std::invalid_argument(absl::StrFormat(
          "--placement %s: give looped, v, or the worker of each stage, such as 0,1,1,0", options.placement));
    }
  }
  return placement;
}

Case generate(const CaseOptions& options) {
  const auto& rule = schedule_rule(options.schedule);
  const auto kind = !options.placement.empty() ? options.placement : makes_v(rule, options.workers) ? "v" : "looped";
  auto placement = kind == "looped" ? looped(options) : kind == "v" ? v(options) : listed(options);
  const int stages = static_cast<int>(placement.size());
  Layout layout{stages, options.chunks, std::move(placement)};
  auto schedule = make_schedule(options.schedule, layout, checkpoints().at(options.checkpoint));
  return {std::move(layout), std::move(schedule), {}};
}

Edge skip_edge(const std::string& text, int stages) {
  int from = 0;
  int to = 0;
  int end = 0;
  const bool read = std::sscanf(text.c_str(), "%d:%d%n", &from, &to, &end) == 2;
  if (!read || end != static_cast<int>(text.size()) || from < 0 || from >= to || to >= stages) {
    throw std::invalid_argument(absl::StrFormat("--skip %s: give two of the stages 0 to %d, ascending, such as 0:%d",
                                                text, stages - 1, stages - 1));
  }
  return {from, to, 1, "skip " + text};
}

}  // namespace

Case make_case(const CaseOptions& options) {
  auto made = options.schedule.starts_with('@') ? parse_file(options.schedule.substr(1)) : generate(options);
  for (int s = 1; s < made.layout.stages; ++s) made.edges.push_back({s - 1, s, 1, "activation"});
  for (const auto& skip : options.skips) made.edges.push_back(skip_edge(skip, made.layout.stages));
  const auto capacities = sufficient_capacities(made.layout, made.edges, made.schedule);
  for (std::size_t e = 0; e < made.edges.size(); ++e) {
    made.edges[e].capacity = options.capacity > 0 ? options.capacity : capacities[e];
  }
  return made;
}

Program verified(const Case& made) {
  auto program = Program::make(made.layout, made.edges, made.schedule);
  if (!program.ok()) throw std::invalid_argument(std::string(program.status().message()));
  return *std::move(program);
}

Costs costs_of(const Case& made, const CaseOptions& options) {
  const auto stages = static_cast<std::size_t>(made.layout.stages);
  const double inputs = options.input_gradient > 0 ? options.input_gradient : options.backward / 2;
  const double weights = options.weight_gradient > 0 ? options.weight_gradient : options.backward / 2;
  CellBytes bytes;
  bytes.forward.held = {{options.graph_bytes, Kind::W, 0}};
  bytes.stored.held = {{options.input_bytes, Kind::R, 0}};
  bytes.recompute.held = {{options.graph_bytes, Kind::W, 0}};
  Costs costs{.actions = {stages, {options.forward, options.forward, options.backward, inputs, weights}},
              .edges = std::vector<double>(made.edges.size()),
              .bytes = {stages, bytes}};
  for (int s = 0; s < made.layout.stages; ++s) {
    for (auto* action : {&costs.bytes[s].forward, &costs.bytes[s].stored, &costs.bytes[s].recompute}) {
      for (auto& held : action->held) held.stage = s;
    }
  }
  return costs;
}

}  // namespace gpipe::examples
