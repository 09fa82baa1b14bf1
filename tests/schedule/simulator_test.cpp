// The simulator: times, cells and bytes.
#include <limits>

#include "gpipe/simulator.h"

#include "gpipe/schedule/verifier.h"
#include "gpipe/schedules.h"
#include "tests/runtime/generated_programs.h"

namespace gpipe::testing {
namespace {

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

TEST(Simulator, ForwardsOfRecomputedCellsHaveTheirOwnCost) {
  const auto program = gpipe_program(straight(1, 3), Checkpoint::kExceptLast);
  auto costs = even(program, {5, 1, 2, 0, 0});
  costs.stored = {3};
  const auto result = simulate(program, costs);
  EXPECT_EQ(span_of(result.timeline, "0F0").end, 3);
  EXPECT_EQ(span_of(result.timeline, "0F1").end, 6);
  EXPECT_EQ(span_of(result.timeline, "0F2").end, 11) << "the last micro-batch is not recomputed";
}

TEST(Simulator, ALinkSendsOneTransferAfterAnother) {
  const auto program = gpipe_program(straight(2, 3), Checkpoint::kNever);
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
  const std::vector<Edge> edges = {{0, 1, "a"}, {1, 2, "b"}, {0, 1, "c"}, {0, 2, "d"}};
  const auto program = Program::make(layout, edges, fill_drain(layout, Checkpoint::kNever));
  auto costs = even(program, {1, 0, 1, 0, 0}, 2);
  costs.sending = costs.edges;
  const auto result = simulate(program, costs);
  EXPECT_EQ(start(result, "1F0"), 5) << "two transfers of 2 s";
  EXPECT_EQ(start(result, "2F0"), 8) << "another link";
  EXPECT_EQ(start(result, "0B0"), 17) << "1B0 ends at 13, and the link back sends two gradients";
}

TEST(Simulator, RefusesCostsThatDoNotFit) {
  const auto program = plain_program(straight(2, 1), fill(straight(2, 1)));
  const std::function<void(Costs&)> changes[] = {
      [](Costs& costs) { costs.actions[1][4] = -1; },
      [](Costs& costs) { costs.actions[1][4] = std::numeric_limits<double>::quiet_NaN(); },
      [](Costs& costs) { costs.edges[0] = std::numeric_limits<double>::infinity(); },
      [](Costs& costs) { costs.actions.pop_back(); },
      [](Costs& costs) { costs.edges.clear(); },
      [](Costs& costs) {
        costs.sending = {0.0, 0.0};
      },
      [](Costs& costs) { costs.sending = {-1.0}; },
      [](Costs& costs) { costs.sending = {2.0}; }};
  auto costs = even(program, {1, 1, 1, 1, 1});
  EXPECT_NO_THROW(simulate(program, costs));
  for (const auto& change : changes) {
    auto wrong = costs;
    change(wrong);
    EXPECT_THROW(simulate(program, wrong), std::invalid_argument);
  }
}

/// The makespan: the longest path through data dependencies and list order, found by relaxing until nothing changes.
double longest_path(const Program& program, const Costs& costs) {
  std::map<std::tuple<bool, int, int>, double> sent;  // by whether forward, stage and micro-batch: the end
  double end = 0;
  for (bool changed = true; changed;) {
    changed = false;
    for (const auto& list : program.schedule()) {
      double now = 0;
      for (const auto& [kind, stage, m] : list) {
        const bool forward = kind == Kind::F;
        const bool exchanges = forward || kind == Kind::B || kind == Kind::I;
        for (std::size_t e = 0; exchanges && e < program.edges().size(); ++e) {
          const Edge& edge = program.edges()[e];
          const auto [from, to] = forward ? std::pair(edge.from, edge.to) : std::pair(edge.to, edge.from);
          if (to == stage) now = std::max(now, sent[{forward, from, m}] + costs.edges[e]);
        }
        now += costs.actions[stage][static_cast<std::size_t>(kind)];
        if (exchanges) changed |= std::exchange(sent[{forward, stage, m}], now) != now;
      }
      end = std::max(end, now);
    }
  }
  return end;
}

TEST(Simulator, RandomProgramsStayWithinTheirBounds) {
  std::mt19937_64 random(11);
  int simulated = 0;
  for (int i = 0; i < 200; ++i) {
    const auto [layout, edges, schedule] = shuffled_parts(random);
    if (!refusal(layout, edges, schedule).empty()) continue;
    ++simulated;
    const auto program = Program::make(layout, edges, schedule);
    auto costs = even(program, {});
    for (auto& of_stage : costs.actions) {
      for (double& it : of_stage) it = draw(random, 1, 9);  // integers, so that sums are exact
    }
    for (double& it : costs.edges) it = draw(random, 1, 9);
    const auto result = simulate(program, costs);

    std::vector<double> clock(program.workers(), 0);
    for (const Span& span : result.timeline.spans) {
      EXPECT_GE(span.start, clock[span.worker]);
      clock[span.worker] = span.end;
    }
    EXPECT_EQ(result.makespan, longest_path(program, costs));
    EXPECT_GE(result.bubble, 0);
    EXPECT_LT(result.bubble, 1);
    const auto live = verify(layout, edges, schedule).live;
    std::vector<int> bounds(program.workers());
    for (int s = 0; s < layout.stages; ++s) bounds[layout.placement[s]] += live[s];
    for (int w = 0; w < program.workers(); ++w) EXPECT_LE(result.peak_cells[w], bounds[w]);
  }
  EXPECT_GT(simulated, 40);
}

/// Each kind of bytes has its own decimal digit: forward 1,000, stored 100, recomputed 900, sent 10, parameters 1.
CellBytes cells(int stage) {
  return {.forward = {1005, {{1000, Until::kLast, stage}}},
          .stored = {305, {{100, Until::kLast, stage}}},
          .recompute = {905, {{900, Until::kLast, stage}}},
          .backward = {40, {{10, stage == 0 ? Until::kNever : Until::kSendsGradients, std::max(0, stage - 1)}}},
          .parameters = 1};
}

Simulation run(int stages, int micro_batches, Checkpoint checkpoint, std::vector<CellBytes> bytes) {
  const auto program = gpipe_program(straight(stages, micro_batches), checkpoint);
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
  const auto timeline = run(2, 2, Checkpoint::kNever, {cells(0), cells(1)}).timeline;
  EXPECT_EQ(print(timeline),
            "0F0 0 1005 1000; 0F1 1000 2005 2000; 0B1 2000 2040 1011; 0B0 1011 1051 21; "
            "1F0 0 1005 1000; 1F1 1000 2005 2000; 1B1 2000 2040 1011; 1B0 1011 1051 11; ");
  EXPECT_THAT(timeline.peak_bytes(), ElementsAre(2040, 2040));
}

TEST(Footprint, OutputsBelongToTheCallerAfterTheLastForward) {
  auto last = cells(1);
  last.forward.held = {{600, Until::kLast, 1}, {400, Until::kForwardsEnd}};
  EXPECT_THAT(print(run(2, 2, Checkpoint::kNever, {cells(0), last}).timeline),
              ::testing::EndsWith("1F0 0 1005 1000; 1F1 1000 2005 2000; 1B1 1200 1240 611; 1B0 611 651 11; "));
}

TEST(Footprint, PeakIsAtLeastTheBytesAfterTheAction) {
  auto bytes = cells(0);
  bytes.forward.extra = 700;
  EXPECT_THAT(print(run(1, 2, Checkpoint::kNever, {bytes}).timeline),
              ::testing::StartsWith("0F0 0 1000 1000; 0F1 1000 2000 2000; 0B1 "));
}

// Worker 1 may be slower than it seems. Worker 0 waits for it in its first backward.
TEST(Footprint, WhatAnotherWorkerFreesCountsUntilItIsWaitedFor) {
  auto sender = cells(0);
  sender.forward.held = {{1000, Until::kForward, 1}};
  EXPECT_THAT(print(run(2, 3, Checkpoint::kNever, {sender, cells(1)}).timeline),
              ::testing::StartsWith("0F0 0 1005 1000; 0F1 1000 2005 2000; 0F2 2000 3005 3000; 0B2 0 40 11; "));
}

TEST(Footprint, GradientsAreHeldUntilASlowReceiverHasRun) {
  const auto program = gpipe_program(straight(2, 3), Checkpoint::kNever);
  const auto simulation = simulate(program, {{{{1, 0, 100, 0, 0}}, {{1, 0, 1, 0, 0}}}, {0}, {cells(0), cells(1)}});
  EXPECT_EQ(simulation.timeline.spans.back().bytes.after, 31);
}

TEST(Footprint, BytesCanBeHeldUntilTheLaterOfTwoActions) {
  auto sender = cells(0);
  sender.forward.held = {{1000, Until::kForward, 1, /*until_own_backward=*/true}};
  EXPECT_THAT(print(run(2, 2, Checkpoint::kNever, {sender, cells(1)}).timeline),
              ::testing::StartsWith("0F0 0 1005 1000; 0F1 1000 2005 2000; 0B1 2000 2040 1011; 0B0 1011 1051 21; 1F0"));
}

TEST(Footprint, RefusesBytesOfOtherStages) {
  const auto running = [](const std::vector<CellBytes>& bytes) {
    return [bytes] { run(2, 2, Checkpoint::kNever, bytes); };
  };
  EXPECT_THAT(running({cells(0)}), refused("got bytes for 1 stages, but the program has 2 stages"));
  auto connected = run(2, 2, Checkpoint::kNever, {}).timeline;
  connected.edges.push_back({1, 2, "far"});
  EXPECT_THAT([&] { account(connected, {cells(0), cells(1)}); }, refused("the timeline has an edge from stage 1 to 2"));
  auto bad = cells(1);
  bad.backward.held = {{10, Until::kSendsGradients, 2}};
  EXPECT_THAT(running({cells(0), bad}), refused("held until an action of stage 2, but there are 2 stages"));
  for (const int stage : {-1, 2}) {
    auto timeline = run(2, 2, Checkpoint::kNever, {}).timeline;
    timeline.spans.front().action.stage = stage;
    const auto accounting = [&] { account(timeline, {cells(0), cells(1)}); };
    const auto text = "the timeline has stage " + std::to_string(stage) + ", but bytes are given for 2 stages";
    EXPECT_THAT(accounting, refused(text));
  }
}

}  // namespace
}  // namespace gpipe::testing
