// Timelines.
#include "gpipe/timeline.h"

#include <nlohmann/json.hpp>

#include "tests/schedule/programs.h"

namespace gpipe::testing {
namespace {

using nlohmann::json;
using ::testing::Pair;

/// The events of one phase.
std::vector<json> events(const Timeline& timeline, const std::string& phase) {
  std::vector<json> result;
  const json document = json::parse(to_chrome_json(timeline));
  for (const json& event : document.at("traceEvents")) {
    if (event.at("ph") == phase) result.push_back(event);
  }
  return result;
}

/// Two stages, one micro-batch; starts 10 s after the clock's epoch.
Timeline small() {
  return {2,
          {{0, 1, "activation 0->1"}},
          {{0, action("0F0"), 10, 10.5, 3},
           {0, action("0B0"), 12, 13, 3},
           {1, action("1F0"), 10.5, 11, 3},
           {1, action("1R0"), 11, 11.25, 3},
           {1, action("1B0"), 11.25, 12, 3}}};
}

TEST(Timeline, ComputesMakespanAndBubble) {
  EXPECT_DOUBLE_EQ(small().makespan(), 3);
  EXPECT_DOUBLE_EQ(small().bubble(), 1 - 3.0 / 6);
  EXPECT_EQ(Timeline{}.makespan(), 0);
  EXPECT_EQ(Timeline{}.bubble(), 0);
}

TEST(ChromeJson, HasATrackPerWorkerAndASlicePerAction) {
  const auto tracks = events(small(), "M");
  ASSERT_EQ(tracks.size(), 2);
  EXPECT_EQ(tracks[1].at("name"), "thread_name");
  EXPECT_EQ(tracks[1].at("tid"), 1);
  EXPECT_EQ(tracks[1].at("args").at("name"), "worker 1");
  const auto slices = events(small(), "X");
  ASSERT_EQ(slices.size(), 5);
  const json& recompute = slices[3];
  EXPECT_EQ(recompute.at("name"), "1R0");
  EXPECT_EQ(recompute.at("tid"), 1);
  EXPECT_DOUBLE_EQ(recompute.at("ts"), 1e6);
  EXPECT_DOUBLE_EQ(recompute.at("dur"), 0.25e6);
  EXPECT_EQ(recompute.at("args"), (json{{"stage", 1}, {"micro_batch", 0}, {"kind", "R"}, {"step", 3}}));
  auto with_bytes = small();
  with_bytes.spans[0].bytes = {1, 3, 2};
  const auto counters = events(with_bytes, "C");
  ASSERT_EQ(counters.size(), 2);
  EXPECT_EQ(counters[0].at("args").at("bytes"), 3) << "the peak";
  EXPECT_EQ(counters[1].at("args").at("bytes"), 2);
  EXPECT_TRUE(json::parse(to_chrome_json({})).at("traceEvents").empty());
}

TEST(ChromeJson, HasAnArrowPerEdgeAndDirectionWithinAStep) {
  auto timeline = small();
  timeline.edges[0].name = "a \"quoted\\\" name\n\t\x01 of größe";
  const auto expect_inside = [&](const json& event, int worker, double from, double to) {
    EXPECT_EQ(event.at("tid"), worker);
    EXPECT_GT(event.at("ts"), from * 1e6);
    EXPECT_LT(event.at("ts"), to * 1e6);
    EXPECT_EQ(event.at("name"), timeline.edges[0].name);
  };
  const auto starts = events(timeline, "s");
  const auto ends = events(timeline, "f");
  ASSERT_EQ(starts.size(), 2);
  ASSERT_EQ(ends.size(), 2);
  expect_inside(starts[0], 0, 0, 0.5);   // 0F0
  expect_inside(ends[0], 1, 0.5, 1);     // 1F0
  expect_inside(starts[1], 1, 1.25, 2);  // 1B0
  expect_inside(ends[1], 0, 2, 3);       // 0B0
  for (const int arrow : {0, 1}) EXPECT_EQ(starts[arrow].at("id"), ends[arrow].at("id"));
  EXPECT_NE(starts[0].at("id"), starts[1].at("id"));
  auto partial = small();
  partial.spans.resize(3);  // 1R0 and 1B0 did not run
  EXPECT_EQ(events(partial, "s").size(), 1);
  EXPECT_EQ(events(partial, "f").size(), 1);
  auto twice = small();  // two replicas
  twice.replicas = 2;
  twice.workers = 4;
  for (Span span : small().spans) {
    span.worker += 2;
    twice.spans.push_back(span);
  }
  EXPECT_EQ(events(twice, "s").size(), 4) << "arrows stay within a replica";
  for (Span& span : timeline.spans) span.step = span.worker;
  EXPECT_TRUE(events(timeline, "s").empty());
}

}  // namespace
}  // namespace gpipe::testing
