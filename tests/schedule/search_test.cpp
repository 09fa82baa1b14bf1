// Schedules that simulation finds: list schedules, the search for the fastest one, and the choice of "auto".
#include <array>
#include <string_view>

#include "gpipe/schedule/auto_schedule.h"
#include "gpipe/schedule/greedy.h"
#include "gpipe/schedule/schedule_source.h"
#include "tests/schedule/programs.h"

namespace gpipe::testing {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

Simulation simulated(const Workload& work, const Schedule& schedule) {
  return simulate(Program::make(work.layout, work.edges, schedule), work.costs);
}

// A model with equal times of F, I and W.
Workload even(const Layout& layout, const std::vector<Edge>& edges) {
  const std::vector<std::array<double, 5>> actions(layout.stages, {1, 0, 2, 1, 1});
  return {layout, edges, {.actions = actions, .edges = std::vector<double>(edges.size())}};
}
Workload even(const Layout& layout) { return even(layout, chain(layout.stages)); }

// Draws workloads with unequal stages.
class Draw {
 public:
  int pick(int from, int to) { return std::uniform_int_distribution<int>(from, to)(random_); }
  double real(double from, double to) { return std::uniform_real_distribution<double>(from, to)(random_); }

  Workload workload() {
    const int workers = pick(1, 4);
    const int loops = pick(1, 2);
    Workload work{.layout = looped(workers, loops, pick(1, 12))};
    const int stages = work.layout.stages;
    auto& placement = work.layout.placement;
    if (loops == 2 && pick(0, 1) == 0) placement = v_placement(stages);
    if (pick(0, 2) == 0) std::shuffle(placement.begin(), placement.end(), random_);
    work.checkpoint = std::array{Checkpoint::kNever, Checkpoint::kExceptLast, Checkpoint::kAlways}[pick(0, 2)];
    const bool has_chain = pick(0, 4) > 0;
    for (const Edge& edge : all_pairs(stages)) {
      if (edge.to == edge.from + 1 ? has_chain : pick(0, 4) == 0) work.edges.push_back(edge);
    }
    work.costs.edges.assign(work.edges.size(), pick(0, 1) * real(0, 0.5));
    for (int s = 0; s < stages; ++s) {
      const double size = real(0.5, 1.5);
      const double forward = size * real(0.8, 1.2);
      const double input = size * real(0.8, 1.3);
      const double weight = size * real(0.6, 1.1);
      work.costs.actions.push_back({forward, forward, (input + weight) * real(0.85, 1.05), input, weight});
      work.costs.bytes.push_back(bytes(s, stages));
    }
    if (pick(0, 1) == 0) {
      for (const auto& costs : work.costs.actions) work.costs.stored.push_back(costs[0] * 0.9);
    }
    return work;
  }

  // A part of what gpipe needs, or nothing.
  std::vector<std::int64_t> most_bytes(const Workload& work) {
    if (pick(0, 3) == 0) return {};
    const double part = real(0.2, 1.1);
    auto bytes = simulated(work, make_schedule("gpipe", work.layout, work.checkpoint)).timeline.peak_bytes();
    for (auto& each : bytes) each = static_cast<std::int64_t>(static_cast<double>(each) * part);
    return bytes;
  }

 private:
  CellBytes bytes(int stage, int stages) {
    CellBytes bytes;
    bytes.forward = {pick(0, 30), {{pick(50, 150), Kind::W, stage}, {pick(0, 10), Kind::I, stage}}};
    bytes.stored = {pick(0, 30), {{pick(5, 20), Kind::W, stage}}};
    bytes.recompute = {pick(0, 30), {{pick(50, 150), Kind::W, stage}}};
    bytes.backward.extra = pick(0, 30);
    if (stage + 1 < stages) bytes.forward.held.push_back({pick(0, 20), Kind::F, stage + 1});
    bytes.parameters = pick(0, 100);
    bytes.first_backward_extra = bytes.parameters;
    return bytes;
  }

  std::mt19937 random_{1};
};

bool fits(const Simulation& simulation, const std::vector<std::int64_t>& most_bytes) {
  const auto peaks = simulation.timeline.peak_bytes();
  return std::equal(most_bytes.begin(), most_bytes.end(), peaks.begin(), std::greater_equal<>());
}

// The makespan of the fastest named schedule that keeps to the limit; infinite if none does.
double fastest_named(const Workload& work, const std::vector<std::int64_t>& most_bytes) {
  double fastest = kInfinity;
  for (const auto& rule : schedule_rules()) {
    if (!rule.misfit(work.layout).empty()) continue;
    const auto result = simulated(work, make_schedule(rule.name, work.layout, work.checkpoint));
    if (fits(result, most_bytes)) fastest = std::min(fastest, result.makespan);
  }
  return fastest;
}

std::int64_t count(const Schedule& schedule, Kind kind) {
  const auto text = to_text(schedule);
  return std::count(text.begin(), text.end(), to_char(kind));
}

TEST(GreedySearch, IsNeverSlowerThanANamedScheduleThatFits) {
  Draw draw;
  int faster = 0;
  int fitting = 0;
  int only = 0;
  int none = 0;
  for (int i = 0; i < 400; ++i) {
    SCOPED_TRACE(i);
    const auto work = draw.workload();
    const auto most_bytes = draw.most_bytes(work);
    const double named = fastest_named(work, most_bytes);
    const auto schedule = greedy_schedule(work, most_bytes);
    if (i % 20 == 0) EXPECT_EQ(schedule, greedy_schedule(work, most_bytes)) << "the same each time";
    if (!schedule) {
      EXPECT_EQ(named, kInfinity);
      ++none;
      continue;
    }
    const auto program = Program::make(work.layout, work.edges, *schedule);  // throws for a schedule that is not valid
    const auto result = simulate(program, work.costs);
    EXPECT_TRUE(fits(result, most_bytes));
    EXPECT_LE(result.makespan, named);
    if (named == kInfinity) {
      ++only;
    } else {
      ++fitting;
      if (result.makespan < 0.999 * named) ++faster;
    }
    for (int stage = 0; stage < work.layout.stages; ++stage) {
      for (int m = 0; m < work.layout.micro_batches; ++m) {
        const bool expected = recomputes(work.checkpoint, m, work.layout.micro_batches);
        EXPECT_EQ(program.recomputes(stage, m), expected);
      }
    }
  }
  EXPECT_GT(faster, fitting / 4);
  EXPECT_GT(only, 0);
  EXPECT_GT(none, 0);
}

TEST(Greedy, KeepsBackwardsWholeWhereSplittingCosts) {
  auto work = even(straight(1, 4));
  work.costs.actions = {{1, 0, 2, 1.5, 1}};
  EXPECT_EQ(count(*greedy_schedule(work, {}), Kind::B), 4);

  // Splitting pays on all stages but the first, which sends no gradient.
  work = even(straight(4, 8));
  work.costs.actions[0] = {1, 0, 2, 1.5, 1.5};
  const auto schedule = *greedy_schedule(work, {});
  EXPECT_EQ(count({schedule[0]}, Kind::B), 8);
  EXPECT_EQ(count({schedule[3]}, Kind::I), 8);
}

TEST(Greedy, HasNoScheduleWithoutMemory) {
  auto work = even(straight(2, 4));
  work.costs.bytes.resize(2);
  for (int s = 0; s < 2; ++s) work.costs.bytes[s].forward.held = {{100, Kind::W, s}};
  EXPECT_FALSE(greedy_schedule(work, {99, 99}));
  EXPECT_FALSE(greedy_schedule(work, {1000, 99}));
  EXPECT_TRUE(greedy_schedule(work, {100, 100})) << "one cell at a time";
  EXPECT_TRUE(greedy_schedule(work, {}));
}

TEST(Greedy, RefusesWhatDoesNotFit) {
  auto work = even(straight(2, 4));
  const auto search = [&](std::vector<std::int64_t> most_bytes) {
    return [&work, most_bytes] { greedy_schedule(work, most_bytes); };
  };
  EXPECT_THAT(search({1}), refused("got limits for 1 workers, but the layout has 2: give one per worker"));
  EXPECT_THAT(search({1, 1}), refused("the costs have no bytes"));
  work.costs.bytes.resize(1);
  EXPECT_THAT(search({1, 1}), refused("bytes for 1 stages"));
  work.costs.edges.clear();
  EXPECT_THAT(search({}), refused("costs for 0 edges"));
  work.edges[0].to = 2;
  EXPECT_THAT(search({}), refused("must go to a later stage"));
  work.layout.placement = {0, 2};
  EXPECT_THROW(search({})(), std::invalid_argument);
}

TEST(ListSchedule, KeepsToItsOptionsAndKnowsItsMakespan) {
  Draw draw;
  for (int i = 0; i < 1000; ++i) {
    SCOPED_TRACE(i);
    const auto work = draw.workload();
    const auto& placement = work.layout.placement;
    const ListOptions options{.depth = draw.pick(1, 6),
                              .forward_first = draw.pick(0, 1) == 0,
                              .most_split = std::array{0, 1, 2, ListOptions::kUnlimited}[draw.pick(0, 3)]};
    const auto [lists, makespan] = list_schedule(work, options);
    const auto result = simulated(work, with_recomputes(lists, work.checkpoint, work.layout.micro_batches));
    EXPECT_EQ(result.makespan, makespan);
    for (int worker = 0; worker < work.layout.workers(); ++worker) {
      EXPECT_LE(result.peak_cells[worker], options.depth * std::count(placement.begin(), placement.end(), worker));
      int split = 0;
      for (const auto& action : lists[worker]) {
        split += (action.kind == Kind::I) - (action.kind == Kind::W);
        EXPECT_LE(split, options.most_split);
      }
    }
    EXPECT_EQ(count(lists, Kind::B), options.most_split == 0 ? work.layout.stages * work.layout.micro_batches : 0);
  }
}

// With equal times of F, I and W. With three stages per worker, it can be as slow, but holds fewer cells.
TEST(NamedGreedy, IsFasterThanWholeBackwards) {
  for (int p = 2; p <= 8; ++p) {
    for (int v = 1; v <= 2; ++v) {
      for (const int m : kMicroBatches) {
        const auto work = even(looped(p, v, m));
        const auto makespan = [&](const char* name) {
          return simulated(work, make_schedule(name, work.layout, Checkpoint::kNever)).makespan;
        };
        EXPECT_LT(makespan("greedy"), makespan("interleaved_1f1b")) << p << ' ' << v << ' ' << m;
      }
    }
  }
}

// "auto" against all named schedules, simulated with the costs that it should have measured.

/// Each stage takes longer than the one before by `growth`.
Costs costs(const Layout& layout, double growth) {
  Costs costs;
  for (int s = 0; s < layout.stages; ++s) {
    const double size = 1 + growth * s;
    costs.actions.push_back({size, size, 1.9 * size, 1.1 * size, 0.9 * size});
    costs.stored.push_back(0.9 * size);
  }
  costs.edges.assign(layout.stages - 1, 0);
  return costs;
}

Simulation simulated(const Layout& layout, Schedule schedule, double growth) {
  return simulate(plain_program(layout, std::move(schedule)), costs(layout, growth));
}

std::string chosen(const Layout& layout, Checkpoint checkpoint, double growth = 0, bool saves_memory = false) {
  const auto measured = simulated(layout, measuring_schedule(layout, checkpoint), growth).timeline;
  return fastest_schedule(measured, layout, checkpoint, /*last_is_smaller=*/false, saves_memory);
}

TEST(AutoSchedule, IsWithinOnePercentOfTheFastest) {
  constexpr double kGrowth = 0.1;
  for (const auto checkpoint : {Checkpoint::kNever, Checkpoint::kExceptLast, Checkpoint::kAlways}) {
    for (const int workers : {1, 2, 4}) {
      for (const int micro_batches : {2, 3, 8}) {
        for (const bool v : {false, true}) {
          const auto layout = v ? v_shaped(workers, micro_batches) : straight(workers, micro_batches);
          const auto seconds_of = [&](std::string_view name) {
            return simulated(layout, make_schedule(name, layout, checkpoint), kGrowth).makespan;
          };
          const auto name = chosen(layout, checkpoint, kGrowth);
          for (const auto& rule : schedule_rules()) {
            if (!rule.misfit(layout).empty() || fills_and_drains(rule.name)) continue;
            EXPECT_LE(seconds_of(name), seconds_of(rule.name) * 1.01)
                << name << " instead of " << rule.name << ", " << workers << " workers, " << micro_batches
                << " micro-batches";
          }
        }
      }
    }
  }
}

TEST(AutoSchedule, SavesMemory) {
  const auto saving = [](const Layout& layout, Checkpoint checkpoint) { return chosen(layout, checkpoint, 0, true); };
  EXPECT_EQ(chosen(straight(4, 8), Checkpoint::kNever), "zb_h2");
  EXPECT_EQ(saving(straight(4, 8), Checkpoint::kNever), "zb_h1");
  EXPECT_EQ(saving(straight(4, 3), Checkpoint::kNever), "zb_h1") << "zb_h2 needs more with more micro-batches";
  EXPECT_EQ(saving(straight(4, 8), Checkpoint::kAlways), "1f1b") << "zb_h1 holds more graphs";
  EXPECT_EQ(chosen(straight(1, 8), Checkpoint::kNever), "1f1b") << "equally fast, with the fewest cells";
  EXPECT_EQ(chosen(straight(2, 1), Checkpoint::kNever), "1f1b") << "one micro-batch: known from whole backwards";
}

TEST(AutoSchedule, IgnoresASmallerLastMicroBatch) {
  const auto layout = looped(2, 1, 4);
  auto measured = simulated(layout, measuring_schedule(layout, Checkpoint::kNever), /*growth=*/0).timeline;
  const auto name = fastest_schedule(measured, layout, Checkpoint::kNever, /*last_is_smaller=*/false, false);
  for (auto& span : measured.spans) {
    if (span.action.micro_batch == 3) span.end = span.start + 0.01;
  }
  EXPECT_NE(name, "1f1b");
  EXPECT_EQ(fastest_schedule(measured, layout, Checkpoint::kNever, /*last_is_smaller=*/true, false), name);
}

}  // namespace
}  // namespace gpipe::testing
