// Random programs of all named schedules, and random delays for their actions.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gpipe/schedules.h"
#include "tests/gpipe/random_cases.h"
#include "tests/schedule/programs.h"

namespace gpipe::testing {

inline constexpr int kMostWorkers = 6;

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
    const int workers = draw(random, 1, kMostWorkers);
    const int micro_batches = draw(random, 1, 3 * workers);
    Layout layout =
        draw(random, 0, 2) == 0 ? v_shaped(workers, micro_batches) : looped(workers, draw(random, 1, 3), micro_batches);
    if (draw(random, 0, 3) == 0) shuffle(random, layout.placement);
    if (rule.misfit(layout).empty()) return layout;
  }
}

/// Activations and random skips, in random order.
inline Program draw_program(std::mt19937_64& random, const Layout& layout, const Schedule& schedule) {
  std::vector<std::pair<int, int>> skips;
  for (int left = draw(random, 0, 4); left > 0 && layout.stages > 1; --left) {
    const int from = draw(random, 0, layout.stages - 2);
    skips.emplace_back(from, draw(random, from + 1, layout.stages - 1));
  }
  auto edges = with_skips(chain(layout.stages), skips);
  shuffle(random, edges);
  return make(layout, std::move(edges), schedule);
}

inline GeneratedProgram generate(std::mt19937_64& random) {
  const auto rules = schedule_rules();
  const auto& rule = rules[draw(random, 0, static_cast<int>(rules.size()) - 1)];
  const auto checkpoint = static_cast<Checkpoint>(draw(random, 0, 2));
  const auto layout = draw_layout(random, rule);
  auto program = draw_program(random, layout, make_schedule(rule.name, layout, checkpoint));
  return {std::string(rule.name), checkpoint, std::move(program)};
}

inline std::string describe(const GeneratedProgram& generated) {
  const auto& layout = generated.program.layout();
  std::string text = generated.schedule + ", " + to_string(generated.checkpoint) + ", " +
                     std::to_string(layout.micro_batches) + " micro-batches, workers of the stages:";
  for (const int worker : layout.placement) text += " " + std::to_string(worker);
  for (const auto& edge : generated.program.edges()) {
    text += ", " + edge.name;
  }
  return text;
}

/// Takes up to 50 µs, mostly nothing. Depends on the arguments only, so that threads share nothing.
inline void dally(std::uint64_t seed, const Action& action) {
  std::seed_seq sequence{static_cast<int>(seed), static_cast<int>(action.kind), action.stage, action.micro_batch};
  std::uint32_t number = 0;
  sequence.generate(&number, &number + 1);
  const auto choice = number % 16;
  const auto amount = number / 16 % 64;
  if (choice == 0) std::this_thread::sleep_for(std::chrono::microseconds(amount % 50));
  if (choice >= 1 && choice <= 3) {
    for (std::uint32_t i = 0; i < amount % 4; ++i) std::this_thread::yield();
  }
  if (choice >= 4 && choice <= 7) {
    for (volatile std::uint32_t i = 0; i < 32 * amount;) i = i + 1;
  }
}

}  // namespace gpipe::testing
