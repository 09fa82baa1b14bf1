// Random programs of all named schedules.
#pragma once

#include <random>

#include "tests/schedule/programs.h"
#include "tests/support/support.h"

namespace gpipe::testing {

/// What a seed stands for.
struct GeneratedProgram {
  std::string schedule;
  Checkpoint checkpoint = Checkpoint::kNever;
  Program program;
};

template <typename T>
void shuffle(std::mt19937_64& random, std::vector<T>& values) {
  for (std::size_t i = 1; i < values.size(); ++i) std::swap(values[i], values[draw(random, 0, static_cast<int>(i))]);
}

/// Draws a layout that fits the rule: looped, a V, or any placement.
inline Layout draw_layout(std::mt19937_64& random, const ScheduleRule& rule) {
  for (;;) {
    const int workers = draw(random, 1, 6);
    const int micro_batches = draw(random, 1, 3 * workers);
    Layout layout =
        draw(random, 0, 2) == 0 ? v_shaped(workers, micro_batches) : looped(workers, draw(random, 1, 3), micro_batches);
    if (draw(random, 0, 3) == 0) shuffle(random, layout.placement);
    if (rule.misfit(layout).empty()) return layout;
  }
}

/// Activations and random skips, in random order.
inline Program draw_program(std::mt19937_64& random, const Layout& layout, const Schedule& schedule) {
  std::vector<LayerLink> skips;
  for (int left = draw(random, 0, 4); left > 0 && layout.stages > 1; --left) {
    const int from = draw(random, 0, layout.stages - 2);
    skips.push_back({from, {draw(random, from + 1, layout.stages - 1)}, ""});
  }
  auto edges = chain(layout.stages, skips);
  shuffle(random, edges);
  return Program::make(layout, std::move(edges), schedule);
}

inline GeneratedProgram generate(std::mt19937_64& random) {
  const auto rules = schedule_rules();
  const auto& rule = rules[draw(random, 0, static_cast<int>(rules.size()) - 1)];
  const auto modes = checkpoints();
  const auto checkpoint = std::next(modes.begin(), draw(random, 0, 2))->second;
  const auto layout = draw_layout(random, rule);
  auto program = draw_program(random, layout, make_schedule(rule.name, layout, checkpoint));
  return {std::string(rule.name), checkpoint, std::move(program)};
}

/// The arguments of Program::make.
struct Parts {
  Layout layout;
  std::vector<Edge> edges;
  Schedule schedule;
};

/// A generated program in which some neighbours of a worker's list, of different cells, have changed places. It may
/// deadlock.
inline Parts shuffled_parts(std::mt19937_64& random) {
  const auto program = generate(random).program;
  Parts parts{program.layout(), program.edges(), program.schedule()};
  for (int left = draw(random, 0, 4); left > 0; --left) {
    auto& list = parts.schedule[draw(random, 0, program.workers() - 1)];
    const int at = draw(random, 0, static_cast<int>(list.size()) - 1);
    for (std::size_t i = at; i + 1 < list.size(); ++i) {  // an action may go far
      const auto& [kind, stage, m] = list[i];
      if ((list[i + 1].stage == stage && list[i + 1].micro_batch == m) || draw(random, 0, 3) == 0) break;
      std::swap(list[i], list[i + 1]);
    }
  }
  return parts;
}

inline std::string describe(const GeneratedProgram& generated) {
  const auto& layout = generated.program.layout();
  std::string text = generated.schedule + ", " + to_string(generated.checkpoint) + ", " +
                     std::to_string(layout.micro_batches) + " micro-batches, workers of the stages:";
  for (const int worker : layout.placement) text += " " + std::to_string(worker);
  text += ", edges:";
  for (const auto& edge : generated.program.edges())
    text += " " + std::to_string(edge.from) + "->" + std::to_string(edge.to);
  return text;
}

}  // namespace gpipe::testing
