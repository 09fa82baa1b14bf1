// The rules of schedules.h: their formulas, their lists, and what they refuse.
#include "gpipe/schedules.h"

#include <optional>

#include "gpipe/schedule/verifier.h"
#include "gpipe/schedule_source.h"
#include "tests/schedule/programs.h"

namespace gpipe::testing {
namespace {

Schedule never_recomputing(const std::string& name, const Layout& layout) {
  return make_schedule(name, layout, Checkpoint::kNever);
}

/// The size of the largest group of micro-batches that an interleaved schedule runs at once.
int largest_round(int p, int m) {
  const int rounds = std::max(1, m / p);
  return (m + rounds - 1) / rounds;
}

/// The formulas of a rule, for p workers, v stages on each, m micro-batches, and equal times of F, I and W.
struct Formulas {
  std::string name;
  std::function<std::optional<int>(int p, int v, int m)> overhead;  ///< in the time of an F
  std::function<int(int p, int v, int m, int worker)> cells;        ///< the most at once, as a rule the exact number
  std::function<int(int worker)> graphs = {};                       ///< the most recomputed ones at once, if m >= 4p
  bool is_bound = false;                                            ///< of the cells
};

/// Of a pipeline that fills with forwards: with fewer micro-batches than workers, later loops wait.
std::optional<int> filling(int p, int v, int m) { return 3 * (p - 1) + (v > 1 && m < p ? 3 * (v - 1) * (p - m) : 0); }
int all_cells(int, int v, int m, int) { return v * m; }
int one(int) { return 1; }
int up_to_the_worker(int worker) { return worker + 1; }
int twice_up_to_the_worker(int worker) { return 2 * worker + 1; }

std::vector<Formulas> all_formulas() {
  const auto at_least = [](bool holds, int value) { return holds ? std::optional(value) : std::nullopt; };
  return {
      {"gpipe", filling, all_cells, one},
      {"looped_bfs", filling, all_cells, one},
      {"1f1b", filling, [](int p, int, int m, int worker) { return std::min(m, p - worker); }, one},
      {"interleaved_1f1b", filling,
       [](int p, int v, int m, int worker) {
         return std::min(v * m, (v - 1) * largest_round(p, m) + 2 * (p - 1 - worker) + 1);
       },
       one},
      {"zb_h1", [](int p, int, int m) { return p - 1 + std::max(0, p - m); },
       [](int p, int, int m, int) { return std::min(m, p); }, up_to_the_worker},
      {"zb_h2", [=](int p, int, int m) { return at_least(m >= 2 * p - 1, p - 1); },
       [](int p, int, int m, int) { return std::min(m, 2 * p - 1); }, twice_up_to_the_worker},
      {"interleaved_zb", [=](int p, int, int m) { return at_least(m >= p, p - 1); },
       [](int p, int v, int m, int) { return std::min(v * m, (v - 1) * largest_round(p, m) + p); }, up_to_the_worker},
      {"zb_v", [=](int p, int, int m) { return at_least(m >= 2 * p - 1, p - 1); },
       [](int p, int, int m, int) { return 2 * std::min(m, p); }, twice_up_to_the_worker},
      {"dualpipe_v", [=](int p, int, int m) { return at_least(m >= 2 * p, p - 1); },
       [](int p, int, int m, int) { return std::min(2 * m, 2 * p + 1); }, up_to_the_worker},
      {"v_half",
       [=](int p, int, int m) {
         return at_least(m >= p && (p != 2 || m >= 5), p <= 2 ? p - 1 : p % 2 == 1 ? 3 * p - 4 : 3 * p - 7);
       },
       [](int p, int, int, int) { return 2 * ((p + 2) / 2); },
       {},
       true},
      {"v_min",
       [=](int p, int, int m) {
         return at_least(m >= p && (p != 2 || m >= 4), p == 1 ? 0 : p % 3 != 0 ? 4 * p - 5 : 4 * p - 7);
       },
       [](int p, int, int, int) { return 2 * ((p + 4) / 3); },
       {},
       true},
  };
}

/// The most recomputed graphs at once, per worker.
std::vector<int> peak_graphs(const Schedule& schedule) {
  std::vector<int> peaks;
  for (const auto& list : schedule) {
    int now = 0;
    int& peak = peaks.emplace_back();
    for (const auto& action : list) {
      if (action.kind == Kind::R) peak = std::max(peak, ++now);
      if (action.kind == Kind::B || action.kind == Kind::W) --now;
    }
  }
  return peaks;
}

TEST(Schedules, TakeTheTimeTheCellsAndTheGraphsOfTheirFormulas) {
  std::set<std::string> seen;
  const auto formulas = all_formulas();
  for_each_shape(8, 3, kMicroBatches, [&](const std::string& name, const Layout& layout) {
    const int p = layout.workers();
    const int v = layout.stages / p;
    const int m = layout.micro_batches;
    if (name == "gpipe" && layout.placement != looped_placement(p, layout.stages)) return;
    if (p == 1 && v > 1) return;  // segments of one stage
    const auto of = std::ranges::find(formulas, name, &Formulas::name);
    ASSERT_NE(of, formulas.end());
    seen.insert(name);
    const auto result = simulated(layout, never_recomputing(name, layout));
    if (const auto expected = of->overhead(p, v, m)) EXPECT_EQ(result.makespan - 3 * v * m, *expected);
    // With few micro-batches, some workers of a V hold fewer cells.
    const bool is_bound = of->is_bound || (layout.placement.back() == 0 && p > 1 && m < 2 * p);
    const auto graphs = peak_graphs(make_schedule(name, layout, Checkpoint::kAlways));
    for (int worker = 0; worker < p; ++worker) {
      EXPECT_LE(result.peak_cells[worker], of->cells(p, v, m, worker)) << "worker " << worker;
      if (!is_bound) EXPECT_EQ(result.peak_cells[worker], of->cells(p, v, m, worker)) << "worker " << worker;
      if (of->graphs && m >= 4 * p) EXPECT_EQ(graphs[worker], of->graphs(worker)) << "worker " << worker;
      if (name.starts_with("v_") && m == 4 * p) EXPECT_LE(graphs[worker], 4);
    }
  });
  EXPECT_EQ(seen.size(), schedule_rules().size());
}

/// Expects the micro-batches of each stage's actions of some kinds to ascend, or to descend.
void expect_order(const std::vector<Action>& list, const Layout& layout, const std::string& kinds, bool descending) {
  std::vector<int> next(layout.stages, descending ? layout.micro_batches - 1 : 0);
  for (const auto& [kind, stage, m] : list) {
    if (kinds.find("FRBIW"[static_cast<int>(kind)]) == kinds.npos) continue;
    EXPECT_EQ(m, next[stage]);
    next[stage] += descending ? -1 : 1;
  }
}

// The forwards of a stage run in ascending order, and so do its backwards except in gpipe and looped_bfs: sums have one
// order. In split backwards, neither part changes it.
TEST(Schedules, RunForAnyNumberOfMicroBatchesAndSumInOneOrder) {
  for_each_shape(8, 3, kMicroBatches, [](const std::string& name, const Layout& layout) {
    const auto schedule = make_schedule(name, layout, Checkpoint::kAlways);
    const auto edges = layout.micro_batches > 16 ? chain(layout.stages) : all_pairs(layout.stages);
    EXPECT_NO_THROW(verify(layout, edges, schedule));
    for (const auto& list : schedule) {
      expect_order(list, layout, "F", /*descending=*/false);
      expect_order(list, layout, "BI", fills_and_drains(name));
      expect_order(list, layout, "BW", fills_and_drains(name));
    }
  });
}

TEST(Segments, RunAsOneStage) {
  const std::vector<Checkpoint> modes = {Checkpoint::kNever, Checkpoint::kAlways, Checkpoint::kExceptLast};
  EXPECT_EQ(to_text(make_schedule("1f1b", layout_of({0, 0, 1}, 2), modes)),
            "0F0 1F0 0F1 1F1 1R0 1B0 0B0 1R1 1B1 0B1\n"
            "2F0 2R0 2B0 2F1 2B1\n");
  EXPECT_EQ(to_text(make_schedule("zb_v", layout_of({0, 1, 1, 1, 0}, 1), Checkpoint::kNever)),
            "0F0 4F0 4I0 4W0 0I0 0W0\n"
            "1F0 2F0 3F0 3I0 3W0 2I0 1I0 2W0 1W0\n");
  EXPECT_EQ(error_of<std::invalid_argument>([] {
              make_schedule("1f1b", layout_of({0, 0, 1, 0}, 2), Checkpoint::kNever);
            }),
            "[gpipe] schedule '1f1b' needs stage s on worker s, one stage per worker, but the layout has 4 stages on "
            "workers 0, "
            "0, 1, 0");
  EXPECT_EQ(error_of<std::invalid_argument>([&] { make_schedule("1f1b", straight(2, 2), modes); }),
            "[gpipe] checkpoint has 3 modes, but there are 2 stages; give one mode for all, or one per stage");
}

// Of the micro-batches that a stage has in flight, so many are never stored at once.
TEST(Checkpoints, RecomputeSoManyOfTheMicroBatchesInFlight) {
  for_each_shape(4, 2, {1, 3, 8, 17}, [&](const std::string& name, const Layout& layout) {
    const auto in_flight = most_cells(make_schedule(name, layout, Checkpoint::kNever), layout.stages);
    for (const int count : {0, 1, 2, 3}) {
      const auto schedule = make_schedule(name, layout, Checkpoint::in_flight(count));
      const auto program = Program::make(layout, chain(layout.stages), schedule);
      auto stored = schedule;
      for (auto& list : stored) {
        std::erase_if(list, [&](const Action& it) { return program.recomputes(it.stage, it.micro_batch); });
      }
      const auto most_stored = most_cells(stored, layout.stages);
      for (int s = 0; s < layout.stages; ++s) EXPECT_EQ(most_stored[s], std::max(0, in_flight[s] - count)) << count;
    }
    EXPECT_EQ(make_schedule(name, layout, Checkpoint::in_flight(1000)),
              make_schedule(name, layout, Checkpoint::kAlways));
  });
}

TEST(Schedules, RefuseWhatDoesNotFit) {
  const auto make = [](const char* name, const Layout& layout) { return [=] { never_recomputing(name, layout); }; };
  const std::string one_each = "needs stage s on worker s, one stage per worker";
  const std::string loops = "needs stage s on worker s mod the number of workers";
  EXPECT_THAT(make("1f1f", looped(2, 1, 2)),
              refused("unknown schedule '1f1f'; choose one of gpipe, 1f1b, looped_bfs, interleaved_1f1b"));
  EXPECT_THAT(make("1f1b", looped(2, 2, 2)),
              refused("schedule '1f1b' " + one_each + ", but the layout has 4 stages on workers 0, 1, 0, 1"));
  EXPECT_THAT(make("zb_h2", looped(2, 2, 2)), refused(one_each));
  EXPECT_THAT(make("interleaved_1f1b", {4, 2, {0, 1, 1, 0}}), refused(loops));
  EXPECT_THAT(make("interleaved_zb", v_shaped(2, 2)), refused(loops));
  EXPECT_THAT(make("looped_bfs", {3, 2, {0, 1, 0}}), refused("the same number of stages"));
  for (const auto& name : {"zb_v", "v_half", "v_min", "dualpipe_v"}) {
    EXPECT_THAT(make(name, looped(2, 2, 2)), refused("needs stages s and 2p - 1 - s on worker s of p"));
    EXPECT_THAT(make(name, {3, 2, {0, 1, 0}}), refused("but the layout has 3 stages on workers 0, 1, 0"));
  }
  EXPECT_THROW(make("gpipe", {2, 0, {0, 1}})(), std::invalid_argument);
  EXPECT_THROW(looped_placement(0, 2), std::invalid_argument);
  EXPECT_THROW(v_placement(3), std::invalid_argument);
}

TEST(Schedules, OfZeroBubbleHaveAFormulaForUnequalTimes) {
  std::mt19937 random(1);  // NOLINT: the same costs in each run
  std::uniform_real_distribution<double> time(0.1, 2);
  for (int i = 0; i < 500; ++i) {
    const double forward = time(random);
    const double input = time(random);
    const double weight = time(random);
    const int p = std::uniform_int_distribution<int>(1, 8)(random);
    const int v = std::uniform_int_distribution<int>(1, 3)(random);
    const int m = std::uniform_int_distribution<int>(2 * p, 4 * p + 3)(random);
    const double idle = (p - 1) * std::max({forward, input, forward + input - weight});
    for (const auto& [name, loops] : {std::pair("zb_h1", 1), std::pair("interleaved_zb", v)}) {
      const auto layout = looped(p, loops, m);
      const Times times = {forward, 0, input + weight, input, weight};
      const auto makespan = simulated(layout, never_recomputing(name, layout), times).makespan;
      EXPECT_NEAR(makespan - loops * m * (forward + input + weight), idle, 1e-9) << p << ' ' << v << ' ' << m;
    }
  }
}

}  // namespace
}  // namespace gpipe::testing
