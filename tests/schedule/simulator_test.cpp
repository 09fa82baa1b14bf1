// The simulator: times, cells and bytes.
#include "gpipe/simulator.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <numeric>
#include <stdexcept>

#include "gpipe/schedule/footprint.h"
#include "gpipe/schedule/verifier.h"
#include "gpipe/schedules.h"
#include "tests/schedule/programs.h"

namespace gpipe {
namespace {

using testing::action;
using testing::chain;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::straight;

/// The same costs (of F, R, B, I, W) for every stage.
Costs even(const Program& program, std::array<double, 5> actions, double edge = 0) {
  return {std::vector(program.layout().stages, actions), std::vector(program.edges().size(), edge)};
}

Span span_of(const Timeline& timeline, const std::string& text) {
  for (const Span& span : timeline.spans) {
    if (span.action == action(text)) return span;
  }
  throw std::out_of_range(text);
}

double start(const Simulation& simulation, const std::string& text) { return span_of(simulation.timeline, text).start; }

TEST(Simulator, TimesEveryActionOfASmallProgram) {
  const auto layout = straight(2, 2);
  const auto program = testing::make(layout, chain(2), fill_drain(layout, Checkpoint::kAlways));
  const auto result = simulate(program, even(program, {1, 1, 2, 0, 0}));
  std::string spans;
  for (const Span& span : result.timeline.spans) {
    spans += std::to_string(span.worker) + ":" + to_string(span.action) + "@" +
             std::to_string(static_cast<int>(span.start)) + "-" + std::to_string(static_cast<int>(span.end)) + " ";
  }
  EXPECT_EQ(spans,
            "0:0F0@0-1 0:0F1@1-2 0:0R1@2-3 0:0B1@6-8 0:0R0@8-9 0:0B0@9-11 "
            "1:1F0@1-2 1:1F1@2-3 1:1R1@3-4 1:1B1@4-6 1:1R0@6-7 1:1B0@7-9 ");
  EXPECT_EQ(result.makespan, 11);
  EXPECT_DOUBLE_EQ(result.bubble, 1 - 16.0 / 22);
  EXPECT_EQ(result.timeline.workers, 2);
  EXPECT_EQ(result.timeline.edges.size(), 1);
}

TEST(Simulator, ForwardsOfRecomputedCellsHaveTheirOwnCost) {
  const auto layout = straight(1, 3);
  const auto program = testing::make(layout, {}, fill_drain(layout, Checkpoint::kExceptLast));
  auto costs = even(program, {5, 1, 2, 0, 0});
  costs.stored = {3};
  const auto result = simulate(program, costs);
  EXPECT_EQ(span_of(result.timeline, "0F0").end, 3);
  EXPECT_EQ(span_of(result.timeline, "0F1").end, 6);
  EXPECT_EQ(span_of(result.timeline, "0F2").end, 11) << "the last micro-batch is not recomputed";
}

TEST(Simulator, PeakCellsAddUpOverTheStagesOfAWorker) {
  const auto layout = testing::layout_of({0, 1, 0}, 2);
  const auto program = testing::make(layout, chain(3), fill_drain(layout, Checkpoint::kNever));
  EXPECT_THAT(simulate(program, even(program, {1, 1, 1, 1, 1})).peak_cells, ElementsAre(4, 2));
  const auto inference = testing::make(layout, chain(3), fill(layout));
  EXPECT_THAT(simulate(inference, even(inference, {1, 1, 1, 1, 1})).peak_cells, ElementsAre(1, 1));
}

TEST(Simulator, EdgeLatencyDelaysTheConsumerOnly) {
  const auto layout = straight(2, 2);
  const auto program = testing::make(layout, chain(2), fill_drain(layout, Checkpoint::kNever));
  const auto result = simulate(program, even(program, {1, 0, 1, 0, 0}, 0.5));
  EXPECT_EQ(start(result, "0F1"), 1);
  EXPECT_EQ(start(result, "1F0"), 1.5);
  EXPECT_EQ(start(result, "1F1"), 2.5);
  EXPECT_EQ(start(result, "0B1"), 5);  // 1B1 ends at 4.5
}

TEST(Simulator, ALinkSendsOneTransferAfterAnother) {
  const auto layout = straight(2, 3);
  const auto program = testing::make(layout, chain(2), fill_drain(layout, Checkpoint::kNever));
  auto costs = even(program, {1, 0, 1, 0, 0}, 2.5);
  costs.sending = {2};
  const auto result = simulate(program, costs);
  EXPECT_EQ(start(result, "0F2"), 2) << "the producer does not wait";
  EXPECT_EQ(start(result, "1F0"), 3.5);
  EXPECT_EQ(start(result, "1F1"), 5.5);
  EXPECT_EQ(start(result, "1F2"), 7.5);
  EXPECT_EQ(start(result, "0B2"), 12) << "1B2 ends at 9.5";
  EXPECT_EQ(start(result, "0B0"), 16);
}

TEST(Simulator, EdgesBetweenTwoWorkersShareALink) {
  const auto layout = straight(3, 1);
  std::vector<Edge> edges = {{0, 1, "a"}, {1, 2, "b"}, {0, 1, "c"}, {0, 2, "d"}};
  const auto program = testing::make(layout, edges, fill_drain(layout, Checkpoint::kNever));
  auto costs = even(program, {1, 0, 1, 0, 0}, 2);
  costs.sending = costs.edges;
  const auto result = simulate(program, costs);
  EXPECT_EQ(start(result, "1F0"), 5) << "two transfers of 2 s";
  EXPECT_EQ(start(result, "2F0"), 8) << "another link";
  EXPECT_EQ(start(result, "0B0"), 17) << "1B0 ends at 13, and the link back sends two gradients";
}

TEST(Simulator, ZeroCostsGiveAnEmptyMakespan) {
  const auto program = testing::make(straight(2, 1), chain(2), fill(straight(2, 1)));
  const auto result = simulate(program, even(program, {}));
  EXPECT_EQ(result.makespan, 0);
  EXPECT_EQ(result.bubble, 0);
}

TEST(Simulator, RefusesCostsThatDoNotFit) {
  const auto program = testing::make(straight(2, 1), chain(2), fill(straight(2, 1)));
  const auto good = even(program, {1, 1, 1, 1, 1});
  EXPECT_NO_THROW(simulate(program, good));
  for (const double bad : {-1.0, std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
    auto action = good;
    action.actions[1][4] = bad;
    EXPECT_THROW(simulate(program, action), std::invalid_argument);
    auto edge = good;
    edge.edges[0] = bad;
    EXPECT_THROW(simulate(program, edge), std::invalid_argument);
  }
  auto short_of_a_stage = good;
  short_of_a_stage.actions.pop_back();
  EXPECT_THROW(simulate(program, short_of_a_stage), std::invalid_argument);
  auto short_of_an_edge = good;
  short_of_an_edge.edges.clear();
  EXPECT_THROW(simulate(program, short_of_an_edge), std::invalid_argument);
  for (const auto& sending : std::vector<std::vector<double>>{{0.0, 0.0}, {-1.0}, {2.0}}) {
    auto costs = good;
    costs.sending = sending;
    EXPECT_THROW(simulate(program, costs), std::invalid_argument);
  }
}

TEST(Simulator, HandlesLargePrograms) {
  const auto layout = straight(64, 1024);
  const auto program = testing::make(layout, chain(64), fill_drain(layout, Checkpoint::kNever));
  EXPECT_EQ(simulate(program, even(program, {1, 0, 1, 0, 0})).makespan, 2 * (1024 + 63));
}

/// The makespan: the longest path through data dependencies and list order, found by
/// relaxing until nothing changes.
double longest_path(const Program& program, const Costs& costs) {
  std::vector<Span> spans;
  for (int w = 0; w < program.workers(); ++w) {
    for (const Action& it : program.schedule()[w]) spans.push_back({w, it, 0, 0, 0});
  }
  double end = 0;
  for (bool changed = true; changed;) {
    changed = false;
    for (std::size_t i = 0; i < spans.size(); ++i) {
      const Action& it = spans[i].action;
      double start = i > 0 && spans[i - 1].worker == spans[i].worker ? spans[i - 1].end : 0;
      for (std::size_t e = 0; e < program.edges().size(); ++e) {
        const Edge& edge = program.edges()[e];
        for (const Span& other : spans) {
          const bool forward = it.kind == Kind::F && other.action.kind == Kind::F && edge.to == it.stage &&
                               edge.from == other.action.stage;
          const bool backward = (it.kind == Kind::B || it.kind == Kind::I) &&
                                (other.action.kind == Kind::B || other.action.kind == Kind::I) &&
                                edge.from == it.stage && edge.to == other.action.stage;
          if ((forward || backward) && other.action.micro_batch == it.micro_batch) {
            start = std::max(start, other.end + costs.edges[e]);
          }
        }
      }
      const double finish = start + costs.actions[it.stage][static_cast<std::size_t>(it.kind)];
      changed |= finish != spans[i].end;
      spans[i].end = finish;
      end = std::max(end, finish);
    }
  }
  return end;
}

TEST(Simulator, RandomProgramsStayWithinTheirBounds) {
  std::mt19937 random(11);
  int simulated = 0;
  for (int i = 0; i < 600; ++i) {
    auto parts = testing::random_parts(random);
    if (!testing::refusal(parts.layout, parts.edges, parts.schedule).empty()) continue;
    const auto peaks = verify(parts.layout, parts.edges, parts.schedule);
    ++simulated;
    Costs costs;
    double total = 0;
    std::uniform_int_distribution<int> cost(1, 9);  // integers, so that sums are exact
    for (int s = 0; s < parts.layout.stages; ++s) {
      costs.actions.emplace_back();
      for (double& it : costs.actions.back()) it = cost(random);
    }
    for (std::size_t e = 0; e < parts.edges.size(); ++e) {
      costs.edges.push_back(cost(random));
      total += 2 * costs.edges.back() * parts.layout.micro_batches;
    }
    const auto program = testing::make(parts.layout, parts.edges, parts.schedule);
    const auto result = simulate(program, costs);

    std::vector<double> clock(program.workers(), 0);
    std::vector<double> busy(program.workers(), 0);
    for (const Span& span : result.timeline.spans) {
      EXPECT_GE(span.start, clock[span.worker]);
      clock[span.worker] = span.end;
      busy[span.worker] += span.end - span.start;
      total += span.end - span.start;
    }
    EXPECT_GE(result.makespan, *std::max_element(busy.begin(), busy.end()));
    EXPECT_EQ(result.makespan, longest_path(program, costs));
    EXPECT_LE(result.makespan, total);
    EXPECT_GE(result.bubble, 0);
    EXPECT_LT(result.bubble, 1);
    for (int w = 0; w < program.workers(); ++w) {
      int bound = 0;
      for (int s = 0; s < program.layout().stages; ++s) bound += program.layout().placement[s] == w ? peaks.live[s] : 0;
      EXPECT_LE(result.peak_cells[w], bound);
    }
  }
  EXPECT_GT(simulated, 100);
}

/// Each kind of bytes has its own decimal digit: forward 1,000, stored 100, recomputed 900, sent 10, parameters 1.
CellBytes cells(int stage) {
  return {.forward = {1005, {{1000, Kind::W, stage}}},
          .stored = {305, {{100, Kind::W, stage}}},
          .recompute = {905, {{900, Kind::W, stage}}},
          .backward = {40, {{10, Kind::I, stage == 0 ? HeldBytes::kNeverFreed : stage - 1}}},
          .parameters = 1};
}

/// Makes `bytes` of each forward outputs, which the caller takes.
CellBytes handing_over(CellBytes last, std::int64_t bytes) {
  for (ActionBytes* forward : {&last.forward, &last.stored}) {
    forward->held.front().bytes -= bytes;
    forward->held.push_back({bytes, Kind::F, HeldBytes::kUntilForwardsEnd});
  }
  return last;
}

Simulation run(int stages, int micro_batches, Checkpoint checkpoint, std::vector<CellBytes> bytes) {
  const auto layout = straight(stages, micro_batches);
  const auto program = testing::make(layout, chain(stages), fill_drain(layout, checkpoint));
  return simulate(program, {std::vector<std::array<double, 5>>(stages, {1, 1, 2, 0, 0}),
                            std::vector<double>(program.edges().size(), 0.0), std::move(bytes)});
}

std::string print(const Timeline& timeline) {
  std::string text;
  for (const Span& span : timeline.spans) {
    text += to_string(span.action) + " " + std::to_string(span.bytes.before) + " " + std::to_string(span.bytes.peak) +
            " " + std::to_string(span.bytes.after) + "; ";
  }
  return text;
}

TEST(Footprint, GraphsAccumulateUntilTheDrain) {
  const auto simulation = run(2, 2, Checkpoint::kNever, {cells(0), cells(1)});
  EXPECT_EQ(print(simulation.timeline),
            "0F0 0 1005 1000; 0F1 1000 2005 2000; 0B1 2000 2040 1011; 0B0 1011 1051 21; "
            "1F0 0 1005 1000; 1F1 1000 2005 2000; 1B1 2000 2040 1011; 1B0 1011 1051 11; ");
  EXPECT_THAT(simulation.timeline.peak_bytes(), ElementsAre(2040, 2040));
}

TEST(Footprint, RecomputedCellHoldsItsGraphFromItsRecompute) {
  const auto simulation = run(2, 2, Checkpoint::kAlways, {cells(0), cells(1)});
  EXPECT_EQ(
      print(simulation.timeline),
      "0F0 0 305 100; 0F1 100 405 200; 0R1 200 1105 1100; 0B1 1100 1140 111; 0R0 111 1016 1011; 0B0 1011 1051 21; "
      "1F0 0 305 100; 1F1 100 405 200; 1R1 200 1105 1100; 1B1 1100 1140 111; 1R0 111 1016 1011; 1B0 1011 1051 11; ");
}

TEST(Footprint, OutputsBelongToTheCallerAfterTheLastForward) {
  const auto simulation = run(2, 2, Checkpoint::kNever, {cells(0), handing_over(cells(1), 400)});
  EXPECT_EQ(print(simulation.timeline).substr(print(simulation.timeline).find("1F0")),
            "1F0 0 1005 1000; 1F1 1000 2005 2000; 1B1 1200 1240 611; 1B0 611 651 11; ");
}

TEST(Footprint, PeakIsAtLeastTheBytesAfterTheAction) {
  auto bytes = cells(0);
  bytes.forward.extra = 700;
  const auto simulation = run(1, 2, Checkpoint::kNever, {bytes});
  EXPECT_EQ(print(simulation.timeline).substr(0, 41), "0F0 0 1000 1000; 0F1 1000 2000 2000; 0B1 ");
}

TEST(Footprint, GradientsAreHeldUntilASlowReceiverHasRun) {
  const auto layout = straight(2, 3);
  const auto program = testing::make(layout, chain(2), fill_drain(layout, Checkpoint::kNever));
  const auto simulation = simulate(program, {{{{1, 0, 100, 0, 0}}, {{1, 0, 1, 0, 0}}}, {0}, {cells(0), cells(1)}});
  EXPECT_EQ(simulation.timeline.spans.back().bytes.after, 31);
}

TEST(Footprint, StepsAreAccountedSeparately) {
  auto timeline = run(2, 2, Checkpoint::kExceptLast, {}).timeline;
  EXPECT_THAT(timeline.peak_bytes(), ElementsAre(0, 0));
  auto twice = timeline;
  for (Span span : timeline.spans) {
    span.step = 1;
    span.start += 100;
    span.end += 100;
    twice.spans.push_back(span);
  }
  account(timeline, {cells(0), cells(1)});
  account(twice, {cells(0), cells(1)});
  EXPECT_EQ(print(twice), print(timeline) + print(timeline));
}

TEST(Footprint, BytesCanBeHeldUntilTheLaterOfTwoActions) {
  auto sender = cells(0);
  sender.forward.held = {{1000, Kind::F, 1, /*until_own_backward=*/true}};
  const auto simulation = run(2, 2, Checkpoint::kNever, {sender, cells(1)});
  EXPECT_EQ(print(simulation.timeline).substr(0, 83),
            "0F0 0 1005 1000; 0F1 1000 2005 2000; 0B1 2000 2040 1011; 0B0 1011 1051 21; 1F0 0 10");
}

TEST(Footprint, RefusesBytesOfOtherStages) {
  const auto message = [](const std::vector<CellBytes>& bytes) {
    return error_of<std::invalid_argument>([&] { run(2, 2, Checkpoint::kNever, bytes); });
  };
  EXPECT_THAT(message({cells(0)}), HasSubstr("got bytes for 1 stages, but the program has 2 stages"));
  auto bad = cells(1);
  bad.backward.held = {{10, Kind::I, 2}};
  EXPECT_THAT(message({cells(0), bad}), HasSubstr("held until I of stage 2, but there are 2 stages"));
}

}  // namespace
}  // namespace gpipe
