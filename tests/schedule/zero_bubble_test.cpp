// The schedules with split backwards. Their formulas are for equal times of F, I and W unless noted.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "gpipe/schedule/schedule_source.h"
#include "gpipe/schedule/verifier.h"
#include "gpipe/schedules.h"
#include "gpipe/simulator.h"
#include "tests/schedule/programs.h"
#include "tests/schedule/shapes.h"

namespace gpipe {
namespace {

using testing::for_each_shape;
using testing::kMicroBatches;
using testing::looped;
using testing::v_shaped;

struct Times {
  double forward = 1;
  double input = 1;
  double weight = 1;

  double cell() const { return forward + input + weight; }
};

Simulation simulate(const Layout& layout, const Schedule& schedule, Times times = {}) {
  const auto edges = testing::with_sufficient_capacities(testing::chain(layout.stages, 1), layout, schedule);
  const std::array<double, 5> actions = {times.forward, 0, times.input + times.weight, times.input, times.weight};
  return gpipe::simulate(testing::make(layout, edges, schedule),
                         {.actions = std::vector(layout.stages, actions), .edges = std::vector<double>(edges.size())});
}

// Makespan without the work of a worker.
double overhead(const std::string& name, const Layout& layout, Times times = {}) {
  const auto result = simulate(layout, make_schedule(name, layout, Checkpoint::kNever), times);
  const int loops = layout.stages / layout.workers();
  return result.makespan - loops * layout.micro_batches * times.cell();
}

int first_round(int p, int m) {
  const int rounds = std::max(1, m / p);
  return m / rounds + (m % rounds != 0 ? 1 : 0);
}

TEST(ZeroBubble, H1TakesAThirdOfTheBubbleOf1F1B) {
  for (int p = 1; p <= 8; ++p) {
    for (const int m : kMicroBatches) {
      EXPECT_EQ(overhead("zb_h1", looped(p, 1, m)), p - 1 + std::max(0, p - m)) << p << ' ' << m;
    }
  }
}

// Not with less than 2p - 1 micro-batches.
TEST(ZeroBubble, H2AndVAreIdleOnlyBeforeTheirFirstAction) {
  for (int p = 1; p <= 8; ++p) {
    for (const int m : kMicroBatches) {
      for (const auto& [name, layout] :
           std::map<std::string, Layout>{{"zb_h2", looped(p, 1, m)}, {"zb_v", v_shaped(p, m)}}) {
        if (m < 2 * p - 1) continue;
        SCOPED_TRACE(name + " " + std::to_string(p) + " " + std::to_string(m));
        EXPECT_EQ(overhead(name, layout), p - 1);
        const auto result = simulate(layout, make_schedule(name, layout, Checkpoint::kNever));
        std::map<int, double> ends;
        for (const Span& span : result.timeline.spans) {  // by worker and time
          if (ends.contains(span.worker)) {
            EXPECT_EQ(span.start, ends[span.worker]);
          }
          ends[span.worker] = span.end;
        }
      }
    }
  }
}

TEST(ZeroBubble, H2IsAtMostThreeForwardsSlowerThanH1) {
  for (int p = 1; p <= 8; ++p) {
    for (const int m : kMicroBatches) {
      EXPECT_LE(overhead("zb_h2", looped(p, 1, m)), overhead("zb_h1", looped(p, 1, m)) + 3) << p << ' ' << m;
    }
  }
}

TEST(ZeroBubble, InterleavedAndDualPipeTakeTheBubbleOfH1) {
  for (int p = 1; p <= 8; ++p) {
    for (const int m : kMicroBatches) {
      for (int v = 1; v <= 3 && m >= p; ++v) {
        EXPECT_EQ(overhead("interleaved_zb", looped(p, v, m)), p - 1) << p << ' ' << v << ' ' << m;
      }
      if (m >= 2 * p) {
        EXPECT_EQ(overhead("dualpipe_v", v_shaped(p, m)), p - 1) << p << ' ' << m;
      }
    }
  }
}

TEST(ZeroBubble, HasAFormulaForUnequalTimes) {
  std::mt19937 random(1);  // NOLINT: the same costs in each run
  std::uniform_real_distribution<double> time(0.1, 2);
  for (int i = 0; i < 1500; ++i) {
    const Times times{time(random), time(random), time(random)};
    const int p = std::uniform_int_distribution<int>(1, 8)(random);
    const int v = std::uniform_int_distribution<int>(1, 3)(random);
    const int m = std::uniform_int_distribution<int>(2 * p, 4 * p + 3)(random);
    const double expected =
        (p - 1) * std::max({times.forward, times.input, times.forward + times.input - times.weight});
    EXPECT_NEAR(overhead("zb_h1", looped(p, 1, m), times), expected, 1e-9) << p << ' ' << m;
    EXPECT_NEAR(overhead("interleaved_zb", looped(p, v, m), times), expected, 1e-9) << p << ' ' << v << ' ' << m;
  }
}

TEST(ZeroBubble, HalfAndMinHaveAFixedIdleTime) {
  for (int p = 1; p <= 8; ++p) {
    for (const int m : kMicroBatches) {
      if (m < p) continue;
      SCOPED_TRACE(std::to_string(p) + " workers, " + std::to_string(m) + " micro-batches");
      const double half = overhead("v_half", v_shaped(p, m));
      const double min = overhead("v_min", v_shaped(p, m));
      if (p != 2 || m >= 5) {
        EXPECT_EQ(half, p == 1 ? 0 : p == 2 ? 1 : p % 2 == 1 ? 3 * p - 4 : 3 * p - 7);
      }
      if (p != 2 || m >= 4) {
        EXPECT_EQ(min, p == 1 ? 0 : p % 3 != 0 ? 4 * p - 5 : 4 * p - 7);
      }
    }
  }
}

TEST(ZeroBubble, MinNeedsEqualTimes) {
  const Times times{0.5, 0.65, 0.35};
  EXPECT_NEAR(overhead("v_half", v_shaped(4, 16), times), 4.6, 1e-9);
  EXPECT_NEAR(overhead("v_min", v_shaped(4, 16), times), 20.05, 1e-9);
}

int expected_peak(const std::string& name, int p, int v, int m) {
  if (name == "zb_h1") return std::min(m, p);
  if (name == "zb_h2") return std::min(m, 2 * p - 1);
  if (name == "interleaved_zb") return std::min(v * m, (v - 1) * first_round(p, m) + p);
  if (name == "zb_v") return 2 * std::min(m, p);
  if (name == "dualpipe_v") return std::min(2 * m, 2 * p + 1);
  return 0;
}

TEST(ZeroBubble, HoldsTheCellsOfItsFormula) {
  int formulas = 0;
  int limits = 0;
  for_each_shape(8, 3, kMicroBatches, [&](const std::string& name, const Layout& layout) {
    const int p = layout.workers();
    const auto peaks = simulate(layout, make_schedule(name, layout, Checkpoint::kNever)).peak_cells;
    const int expected = expected_peak(name, p, layout.stages / p, layout.micro_batches);
    if (expected > 0) {
      EXPECT_EQ(*std::max_element(peaks.begin(), peaks.end()), expected);
      // With less micro-batches than the V rules need, some workers hold fewer cells.
      const bool is_v = name == "zb_v" || name == "dualpipe_v";
      if (!is_v || layout.micro_batches >= 2 * p) {
        EXPECT_EQ(*std::min_element(peaks.begin(), peaks.end()), expected);
      }
      ++formulas;
    }
    if (name != "v_half" && name != "v_min") return;
    const int most = 2 * (name == "v_half" ? (p + 2) / 2 : (p + 4) / 3);
    EXPECT_LE(*std::max_element(peaks.begin(), peaks.end()), most);
    ++limits;
  });
  EXPECT_GT(formulas, 0);
  EXPECT_GT(limits, 0);
}

// Per worker: the most recomputed graphs at once.
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

TEST(ZeroBubble, HoldsRecomputedGraphsUntilTheirWeightGradients) {
  for (int p = 1; p <= 8; ++p) {
    const auto graphs = [&](const char* name, const Layout& layout) {
      return peak_graphs(make_schedule(name, layout, Checkpoint::kAlways));
    };
    for (const int m : {4 * p, 4 * p + 1, 64}) {
      for (int r = 0; r < p; ++r) {
        EXPECT_EQ(graphs("zb_h1", looped(p, 1, m))[r], r + 1);
        EXPECT_EQ(graphs("interleaved_zb", looped(p, 2, m))[r], r + 1);
        EXPECT_EQ(graphs("dualpipe_v", v_shaped(p, m))[r], r + 1) << p << ' ' << r << ' ' << m;
        EXPECT_EQ(graphs("zb_h2", looped(p, 1, m))[r], 2 * r + 1);
        EXPECT_EQ(graphs("zb_v", v_shaped(p, m))[r], 2 * r + 1);
        EXPECT_EQ(graphs("gpipe", v_shaped(p, m))[r], 1);
      }
    }
    for (const auto& name : {"v_half", "v_min"}) {
      const auto peaks = graphs(name, v_shaped(p, 4 * p));
      EXPECT_GE(*std::max_element(peaks.begin(), peaks.end()), 2) << name << ' ' << p;
      EXPECT_LE(*std::max_element(peaks.begin(), peaks.end()), 4) << name << ' ' << p;
    }
  }
}

TEST(Schedules, AreValidForAnyNumberOfMicroBatches) {
  for_each_shape(8, 3, kMicroBatches, [](const std::string& name, const Layout& layout) {
    const auto schedule = make_schedule(name, layout, Checkpoint::kAlways);
    const auto edges = testing::with_sufficient_capacities(testing::chain(layout.stages, 1), layout, schedule);
    EXPECT_NO_THROW(verify(layout, edges, schedule));
  });
}

TEST(ZeroBubble, H1) {
  EXPECT_EQ(to_text(make_schedule("zb_h1", looped(2, 1, 4), Checkpoint::kNever)),
            "0F0 0F1 0I0 0W0 0F2 0I1 0W1 0F3 0I2 0W2 0I3 0W3\n"
            "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1F3 1I3 1W2 1W3\n");
  EXPECT_EQ(make_schedule("zb_h1", looped(4, 1, 9), Checkpoint::kNever), testing::zero_bubble(4, 9));
}

// The lists that PyTorch 2.11's ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble and ScheduleDualPipeV make.
TEST(ZeroBubble, EqualsTheListsOfPyTorch) {
  EXPECT_EQ(to_text(make_schedule("interleaved_zb", looped(2, 2, 2), Checkpoint::kNever)),
            "0F0 0F1 2F0 2F1 2I0 2W0 2I1 2W1 0I0 0W0 0I1 0W1\n"
            "1F0 1F1 3F0 3I0 3F1 3I1 3W0 1I0 3W1 1I1 1W0 1W1\n");
  EXPECT_EQ(to_text(make_schedule("zb_v", v_shaped(2, 4), Checkpoint::kNever)),
            "0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3\n"
            "1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 2W3 1W3\n");
  EXPECT_EQ(to_text(make_schedule("dualpipe_v", v_shaped(2, 5), Checkpoint::kNever)),
            "0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 3F2 0B0 0F4 3B2 3F3 0B1 3B3 3F4 0B2 3B4 0I3 0W3 0I4 0W4\n"
            "1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0 1F3 2B1 2F3 1B1 1F4 2B2 2F4 1B2 2B3 1B3 2I4 1I4 2W4 1W4\n");
}

// With fewer micro-batches than the rule needs, the others are left out.
TEST(ZeroBubble, RunsASingleMicroBatch) {
  EXPECT_EQ(to_text(make_schedule("zb_v", v_shaped(2, 1), Checkpoint::kNever)),
            "0F0 3F0 3I0 3W0 0I0 0W0\n"
            "1F0 2F0 2I0 2W0 1I0 1W0\n");
  EXPECT_EQ(to_text(make_schedule("dualpipe_v", v_shaped(2, 1), Checkpoint::kNever)),
            "0F0 3F0 3I0 3W0 0B0\n"
            "1F0 2F0 2B0 1B0\n");
}

}  // namespace
}  // namespace gpipe
