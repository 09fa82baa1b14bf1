#include "gpipe/drawing.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "tests/schedule/programs.h"

namespace gpipe {
namespace {

using testing::action;
using ::testing::HasSubstr;
using ::testing::Not;

int count(const std::string& text, const std::string& part) {
  int found = 0;
  for (auto at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++found;
  return found;
}

TEST(Drawing, HasABoxPerActionARowPerWorkerAndALegend) {
  const Timeline timeline{2,
                          {{0, 1, "activation 0->1"}},
                          {{0, action("0F12"), 10, 10.5},
                           {0, action("0B12"), 12, 13},
                           {1, action("1F12"), 10.5, 11},
                           {1, action("1R12"), 11, 11.002},
                           {1, action("1B12"), 11.25, 12}}};
  const auto svg = to_svg(timeline);
  EXPECT_EQ(count(svg, "<title>"), 5);
  EXPECT_EQ(count(svg, ">12</text>"), 4) << "a narrow box has no label";
  EXPECT_EQ(count(svg, ">worker "), 2);
  EXPECT_THAT(svg, HasSubstr("<title>recompute of micro-batch 12 on stage 1: 2 ms</title>"));
  EXPECT_THAT(svg, HasSubstr("3 s, 54 % idle"));
  for (const auto* kind : {">forward<", ">recompute<", ">backward<"}) EXPECT_THAT(svg, HasSubstr(kind));
  EXPECT_THAT(svg, Not(HasSubstr("weights")));
  EXPECT_THAT(svg, HasSubstr("x=\"72.00\" y=\"47.0\" width=\"146.67\""))
      << "the first action takes a sixth of the time";
}

TEST(Drawing, MarksThePartsOfASplitBackwardWithLetters) {
  const Timeline timeline{.workers = 1,
                          .spans = {{0, action("0F0"), 0, 1}, {0, action("0I0"), 1, 2}, {0, action("0W0"), 2, 3}}};
  const auto svg = to_svg(timeline);
  for (const auto* letter : {">I</text>", ">W</text>"}) {
    EXPECT_EQ(count(svg, letter), 2) << "one in the legend, one in the box";
  }
  EXPECT_THAT(svg, HasSubstr("<title>input gradient of micro-batch 0 on stage 0: 1 s</title>"));
  EXPECT_THAT(svg, HasSubstr("<title>weight gradient of micro-batch 0 on stage 0: 1 s</title>"));
}

TEST(Drawing, DrawsEmptyAndZeroLengthTimelines) {
  EXPECT_THAT(to_svg({}), HasSubstr("</svg>"));
  EXPECT_THAT(to_svg({1, {}, {{0, action("0F0"), 1, 1}}}), Not(HasSubstr("nan")));
}

TEST(Drawing, DrawsLaterStagesOfAWorkerPaler) {
  Timeline timeline{.workers = 1, .spans = {{0, {Kind::F, 0, 0}, 0, 1}, {0, {Kind::F, 1, 0}, 1, 2}}};
  EXPECT_THAT(to_svg(timeline), HasSubstr("fill-opacity=\"0.65\""));
  EXPECT_THAT(to_svg(timeline), HasSubstr("paler: later stage"));
  timeline.spans.pop_back();
  EXPECT_THAT(to_svg(timeline), Not(HasSubstr("fill-opacity")));
}

}  // namespace
}  // namespace gpipe
