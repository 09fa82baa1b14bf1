// List schedules, and the choice of "auto".
#include <string_view>

#include "gpipe/schedule/advice.h"
#include "gpipe/schedule/auto_schedule.h"
#include "gpipe/schedule/list_schedule.h"
#include "gpipe/schedule/merged.h"
#include "gpipe/schedule/verifier.h"
#include "gpipe/schedules.h"
#include "tests/schedule/programs.h"

namespace gpipe::testing {
namespace {

TEST(ListSchedule, KeepsToItsDepthAndFitsAnyPlacement) {
  std::mt19937 random(1);
  const auto pick = [&](int from, int to) { return std::uniform_int_distribution<int>(from, to)(random); };
  for (int i = 0; i < 1000; ++i) {
    SCOPED_TRACE(i);
    auto layout = looped(pick(2, 4), pick(1, 3), pick(1, 12));
    auto& placement = layout.placement;
    if (pick(0, 1) == 0) std::shuffle(placement.begin(), placement.end(), random);
    const auto edges = all_pairs(layout.stages);
    Costs costs;
    for (int s = 0; s < layout.stages; ++s) {
      const auto [f, i, w] = std::array<double, 3>{1.0 * pick(1, 3), 1.0 * pick(1, 3), 1.0 * pick(0, 2)};
      costs.actions.push_back({f, f, i + w, i, w});
    }
    for (std::size_t e = 0; e < edges.size(); ++e) costs.edges.push_back(pick(0, 2) == 0 ? 1 : 0);
    const double depth = pick(1, 12) / 2.;
    const auto lists = list_schedule(layout, edges, costs, Checkpoint::kNever, depth);
    EXPECT_NO_THROW(verify(layout, edges, lists));
    const auto begins = [&](int s) { return s == 0 || placement[s] != placement[s - 1] || is_v(layout); };
    for (int worker = 0; worker < layout.workers(); ++worker) {
      int stages = 0;  // consecutive ones count as one
      for (int s = 0; s < layout.stages; ++s) stages += placement[s] == worker && begins(s);
      auto list = lists[worker];
      std::erase_if(list, [&](const Action& action) { return !begins(action.stage); });
      EXPECT_LE(peak_cells(list), std::max(1. * stages, stages * depth));
    }
  }
}

// Where a rule fits, lists with the rule's cells are as fast, but for a few percent.
TEST(ListSchedule, IsCloseToTheRules) {
  for (const auto& [name, layout, most] :
       std::vector<std::tuple<std::string, Layout, double>>{{"zb_h1", straight(4, 12), 1.06},
                                                            {"zb_h2", straight(4, 12), 1},
                                                            {"interleaved_zb", looped(4, 2, 12), 1.05},
                                                            {"zb_v", v_shaped(4, 12), 1.03},
                                                            {"v_half", v_shaped(4, 12), 1.1}}) {
    SCOPED_TRACE(name);
    const auto by_rule = simulated(layout, make_schedule(name, layout, Checkpoint::kNever));
    const double depth = 1. * std::ranges::max(by_rule.peak_cells) * layout.workers() / layout.stages;
    Costs equal{.actions = std::vector(layout.stages, std::array{1., 1., 2., 1., 1.})};
    const auto edges = plain_program(layout, fill(layout)).edges();
    equal.edges.assign(edges.size(), 0);
    const auto lists = list_schedule(layout, edges, equal, Checkpoint::kNever, depth);
    EXPECT_LE(simulated(layout, lists).makespan, most * by_rule.makespan);
  }
}

// "auto" against all named schedules, simulated with the costs that it should have measured.

/// Each stage takes longer than the one before by `growth`.
Timeline growing(const Layout& layout, Schedule schedule, double growth) {
  Costs costs{.edges = std::vector(layout.stages - 1, 0.)};
  for (int s = 0; s < layout.stages; ++s) {
    const double size = 1 + growth * s;
    costs.actions.push_back({size, size, 1.9 * size, 1.1 * size, 0.9 * size});
    costs.stored.push_back(0.9 * size);
  }
  return simulate(plain_program(layout, std::move(schedule)), costs).timeline;
}

std::string chosen(const Layout& layout, Checkpoint checkpoint, double growth = 0, bool saves_memory = false) {
  const auto measured = growing(layout, with_recomputes(measuring_schedule(layout), checkpoint, layout), growth);
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
            return growing(layout, make_schedule(name, layout, checkpoint), kGrowth).makespan();
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
  EXPECT_TRUE(saving(layout_of({0, 1, 0}, 8), Checkpoint::kAlways).starts_with("0F0")) << "no name fits";
  EXPECT_EQ(chosen(straight(1, 8), Checkpoint::kNever), "1f1b") << "equally fast, with the fewest cells";
  EXPECT_EQ(chosen(straight(2, 1), Checkpoint::kNever), "1f1b") << "one micro-batch: known from whole backwards";
}

std::map<std::string, double> gains_of(const Timeline& timeline) { return gains(timeline, blame(timeline)).at(0); }

/// F, R and B of a stage of so many seconds.
Times thirds(double seconds) { return {seconds / 3, seconds / 3, 2 * seconds / 3, 0, 0}; }

TEST(Gains, OfEachNeighbour) {
  const auto step = [](const Layout& layout, std::string_view name, const std::vector<Times>& times,
                       const Checkpoints& checkpoints = {}) {
    return simulated(layout, make_schedule(name, layout, checkpoints), times).timeline;
  };
  // Layers of 1, 1, 1, 1.8 and 1.8 s, and a loss of 5.4 s.
  auto cut = step(straight(2, 4), "1f1b", {thirds(3), thirds(9)});
  cut.layers = {{0, 1}, {0, 1}, {0, 1}, {1, 1}, {1, 1}, {1, 3}};
  const auto better = step(straight(2, 4), "1f1b", {thirds(4.8), thirds(7.2)});
  EXPECT_NEAR(gains_of(cut).at("balance=[4, 1]"), cut.makespan() - better.makespan(), 1e-9);
  cut.layers[3].seconds = 20;  // then the best cut is the present one
  for (const auto& [change, gain] : gains_of(cut)) EXPECT_FALSE(change.starts_with("balance")) << change;

  const auto few = step(straight(2, 2), "1f1b", {thirds(6), thirds(6)});
  const auto more = step(straight(2, 4), "1f1b", {thirds(3), thirds(3)});
  EXPECT_NEAR(gains_of(few).at("chunks=4"), few.makespan() - more.makespan(), 1e-9);
  EXPECT_LT(gains_of(few).at("chunks=1"), 0);
  EXPECT_FALSE(gains_of(step(straight(2, 32), "1f1b", {thirds(6), thirds(6)})).contains("chunks=64"))
      << "smaller micro-batches may cost more than the bubble";

  const std::vector<Times> equal(4, thirds(3));
  const auto loops = step(looped(2, 2, 4), "interleaved_1f1b", equal);
  const auto vee = step(v_shaped(2, 4), "zb_v", equal);
  const auto found = gains_of(loops);
  EXPECT_FALSE(found.contains("schedule='zb_v', placement=[0, 1, 1, 0]")) << "it splits backwards";
  EXPECT_TRUE(gains_of(vee).contains("schedule='interleaved_zb', placement=[0, 1, 0, 1]"));

  const auto some = step(straight(2, 4), "1f1b", {thirds(6), thirds(6)}, Checkpoint::kAlways);
  const auto first = step(straight(2, 4), "1f1b", {thirds(6), thirds(6)}, {{Checkpoint::kNever, Checkpoint::kAlways}});
  EXPECT_NEAR(gains_of(some).at("checkpoint=['never', 'always']"), some.makespan() - first.makespan(), 1e-9);

  const auto never = step(straight(2, 4), "1f1b", {thirds(6), thirds(6)});
  for (const auto checkpoint : {Checkpoint::kExceptLast, Checkpoint::kAlways, Checkpoint::in_flight(1)}) {
    const auto recomputing = step(straight(2, 4), "1f1b", {thirds(6), thirds(6)}, checkpoint);
    const auto gains = gains_of(recomputing);
    EXPECT_NEAR(gains.at("checkpoint='never'"), recomputing.makespan() - never.makespan(), 1e-9);
    EXPECT_EQ(gains.contains("schedule='1f1b'"), checkpoint != Checkpoint::in_flight(1))
        << "only named modes are known";
  }

  auto stolen = never;
  for (auto& span : stolen.spans) span.queued = (span.end - span.start) / 2;
  EXPECT_NEAR(gains_of(stolen).at("a core for each worker"), stolen.makespan() / 2, 1e-9);
}

TEST(AutoSchedule, IgnoresASmallerLastMicroBatch) {
  const auto layout = looped(2, 1, 4);
  auto measured = growing(layout, measuring_schedule(layout), /*growth=*/0);
  const auto name = fastest_schedule(measured, layout, Checkpoint::kNever, /*last_is_smaller=*/false, false);
  for (auto& span : measured.spans) {
    if (span.action.micro_batch == 3) span.end = span.start + 0.01;
  }
  EXPECT_NE(name, "1f1b");
  EXPECT_EQ(fastest_schedule(measured, layout, Checkpoint::kNever, /*last_is_smaller=*/true, false), name);
}

}  // namespace
}  // namespace gpipe::testing
