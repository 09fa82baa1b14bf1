// Programs: edges, the lists of gpipe, text, and what the verifier proves and refuses.
#include "gpipe/program.h"

#include <fstream>
#include <limits>
#include <span>
#include <tuple>

#include "gpipe/schedule/verifier.h"
#include "gpipe/schedule_source.h"
#include "gpipe/schedules.h"
#include "tests/runtime/generated_programs.h"

namespace gpipe::testing {
namespace {

TEST(ReadSchedule, TakesLongCommentsButNoLongFiles) {
  const TemporaryDirectory folder;
  std::string text = "0F0 0B0 # ";
  for (const int comment : {0, 1 << 16, 1 << 20}) {  // also longer than what is read at once
    text.resize(text.size() + comment, '.');
    std::ofstream(folder / "schedule") << text;
    EXPECT_EQ(read_schedule(folder / "schedule").schedule[0].size(), 2u);
  }
  std::filesystem::resize_file(folder / "schedule", (std::uintmax_t{64} << 20) + 1);
  EXPECT_THAT([&] { read_schedule(folder / "schedule"); }, refused("larger than 64 MiB"));
  EXPECT_THAT([&] { read_schedule(folder.path()); }, refused("cannot read"));
}

using Ends = std::vector<std::pair<int, int>>;

Ends ends_of(const std::vector<Edge>& edges) {
  Ends ends;
  for (const auto& edge : edges) ends.emplace_back(edge.from, edge.to);
  return ends;
}

TEST(CutEdges, ActivationsComeBeforeLinksThatCrossACut) {
  std::vector<int> crossing;
  const auto edges =
      cut_edges({2, 1, 3}, {{0, {1}, "inside"}, {1, {3}, "far"}, {2, {2}, "own"}, {0, {2}, "near"}}, {}, &crossing);
  EXPECT_EQ(ends_of(edges), (Ends{{0, 1}, {1, 2}, {0, 2}, {0, 1}}));
  EXPECT_EQ(edges[2].name, "skip far");
  EXPECT_THAT(crossing, ElementsAre(1, 3));
}

TEST(CutEdges, ASkipReachesEachWorkerOnceAndGoesOnToTheWorkersLaterReaders) {
  const auto ends_of_skip = [](const LayerLink& skip, const std::vector<int>& placement) {
    const auto ends = ends_of(cut_edges(std::vector<std::int64_t>(6, 1), {skip}, placement));
    return Ends(ends.begin() + 5, ends.end());  // without the activations'
  };
  const LayerLink skip{0, {1, 2, 2, 3, 4, 5}, ""};
  EXPECT_EQ(ends_of_skip(skip, {}), (Ends{{0, 1}, {1, 2}, {2, 3}, {3, 4}, {4, 5}}));
  EXPECT_EQ(ends_of_skip(skip, {0, 1, 0, 1, 0, 1}), (Ends{{0, 1}, {0, 2}, {1, 3}, {2, 4}, {3, 5}}));
  EXPECT_EQ(ends_of_skip(skip, {0, 1, 2, 2, 1, 0}), (Ends{{0, 1}, {1, 2}, {2, 3}, {1, 4}, {0, 5}}));
  EXPECT_EQ(ends_of_skip({1, {1, 3, 5}, ""}, {0, 1, 2, 0, 1, 2}), (Ends{{1, 3}, {3, 5}}));
}

TEST(CutEdges, RefusesInvalidBalancesAndLayers) {
  constexpr auto kHuge = std::numeric_limits<std::int64_t>::max();
  EXPECT_THAT([] { cut_edges({kHuge, kHuge, 41}, {}); }, refused("sums to more than 2147483647"));
  EXPECT_THAT([] { cut_edges({std::int64_t{1} << 31}, {}); }, refused("[2147483648] sums to more than 2147483647"));
  EXPECT_THAT([] { cut_edges({3, -1}, {}); }, refused("balance is [3, -1], but every stage needs at least one layer"));
  EXPECT_EQ(cut_edges({1, (std::int64_t{1} << 31) - 2}, {}).size(), 1U) << "needs no memory for its layers";
  EXPECT_THROW(cut_edges({1, 1}, {{0, {2}, "s"}}), std::out_of_range);
  EXPECT_THROW(cut_edges({1, 1}, {{-1, {1}, "s"}}), std::out_of_range);
}

TEST(Program, KnowsItsPhases) {
  EXPECT_TRUE(gpipe_program(straight(3, 2)).two_phase());
  EXPECT_FALSE(plain_program(straight(2, 3), make_schedule("1f1b", straight(2, 3), Checkpoint::kNever)).two_phase());
}

TEST(FillDrain, RecomputesAsTheModeSaysAndDrainsInReverse) {
  EXPECT_EQ(to_text(fill(layout_of({0, 1, 0}, 2))), "0F0 0F1 2F0 2F1\n1F0 1F1\n");
  const auto lists = [](const Layout& layout, Checkpoint checkpoint) {
    return to_text(fill_drain(layout, checkpoint));
  };
  EXPECT_EQ(lists(straight(2, 2), Checkpoint::kNever), "0F0 0F1 0B1 0B0\n1F0 1F1 1B1 1B0\n");
  EXPECT_EQ(lists(straight(2, 3), Checkpoint::kExceptLast),
            "0F0 0F1 0F2 0B2 0R1 0B1 0R0 0B0\n1F0 1F1 1F2 1B2 1R1 1B1 1R0 1B0\n");
  EXPECT_EQ(lists(straight(1, 1), Checkpoint::kExceptLast), "0F0 0B0\n");
  EXPECT_EQ(lists(straight(2, 2), Checkpoint::kAlways), "0F0 0F1 0R1 0B1 0R0 0B0\n1F0 1F1 1R1 1B1 1R0 1B0\n");
  EXPECT_EQ(lists(straight(1, 1), Checkpoint::kAlways), "0F0 0R0 0B0\n");
  EXPECT_EQ(lists(layout_of({0, 1, 1, 0}, 2), Checkpoint::kExceptLast),
            "0F0 0F1 3F0 3F1 3B1 3R0 3B0 0B1 0R0 0B0\n1F0 1F1 2F0 2F1 2B1 2R0 2B0 1B1 1R0 1B0\n");
}

TEST(Generators, RefuseTooManyCellsAndInvalidLayouts) {
  constexpr int kMost = std::numeric_limits<int>::max();
  // In int arithmetic 65536 x 65536 would be 0, and 65537 x 65536 would be 65536.
  for (const auto& [stages, micro_batches] :
       {std::pair(2, kMost), std::pair(kMost, 2), std::pair(1 << 16, 1 << 16), std::pair((1 << 16) + 1, 1 << 16)}) {
    EXPECT_THAT(refusal({stages, micro_batches, {}}, {}, {}), HasSubstr("at most 4194304 cells")) << stages;
  }
  EXPECT_THROW(fill(layout_of({0, 2}, 1)), std::invalid_argument);
  EXPECT_THROW(fill(layout_of({0, -1}, 1)), std::invalid_argument);
  EXPECT_THROW(fill_drain(straight(2, 0), Checkpoint::kNever), std::invalid_argument);
  EXPECT_THROW(fill(straight(2, kMost)), std::invalid_argument);
  EXPECT_THROW(fill_drain(straight(2, kMost), Checkpoint::kNever), std::invalid_argument);
}

TEST(ScheduleText, ParsesWhatItPrints) {
  std::mt19937_64 random(1);
  for (int i = 0; i < 200; ++i) {
    const auto parts = shuffled_parts(random);
    const auto parsed = parse_schedule(to_text(parts.schedule));
    EXPECT_EQ(parsed.schedule, parts.schedule);
    EXPECT_EQ(parsed.layout.placement, parts.layout.placement);
    EXPECT_EQ(parsed.layout.micro_batches, parts.layout.micro_batches);
  }
}

TEST(ScheduleText, AcceptsCommasCommentsAndEmptyLines) {
  const auto parsed = parse_schedule("# one micro-batch\n\n0F0,,1F0, 1B0\t0B0  # worker 0\r\n  2F0 2I0 2W0\n");
  EXPECT_EQ(to_text(parsed.schedule), "0F0 1F0 1B0 0B0\n2F0 2I0 2W0\n");
  EXPECT_EQ(parsed.layout.placement, (std::vector<int>{0, 0, 1}));
  EXPECT_EQ(parsed.layout.stages, 3);
  EXPECT_EQ(parsed.layout.micro_batches, 1);
}

TEST(ScheduleText, NamesLineColumnAndReason) {
  const std::pair<const char*, const char*> cases[] = {
      {"0F0 0X0\n", "line 1, column 5: '0X0' is not an action"},
      {"0F0 0B0\n\n 1F0 1B\n", "line 3, column 6: '1B' is not an action"},
      {"0F99999999999", "line 1, column 1"},
      {"0F0 0B0\n1F0 0F1", "line 2, column 5: stage 0 is on worker 0 already"},
      {"0F0 0B0\n2F0 2B0", "stage 1 has no action, but stage 2 has"},
      {"0F4000000 0B4000000", "there are 2 actions for 1 stages x 4000001 micro-batches"},
      {" , \n# nothing\n", "the schedule is empty"}};
  for (const auto& it : cases) EXPECT_THAT([&] { parse_schedule(it.first); }, refused(it.second));
}

TEST(Verifier, BoundsLiveCellsAndGraphs) {
  using Bounds = std::vector<std::vector<int>>;
  const auto bounds = [](const Layout& layout, const Schedule& schedule) {
    const auto peaks = verify(layout, chain(layout.stages), schedule);
    return Bounds{peaks.live, peaks.graphs};
  };
  const auto layout = straight(2, 3);
  EXPECT_EQ(bounds(layout, fill_drain(layout, Checkpoint::kNever)), (Bounds{{3, 3}, {3, 3}}));
  EXPECT_EQ(bounds(layout, fill_drain(layout, Checkpoint::kExceptLast)), (Bounds{{3, 3}, {1, 1}}));
  EXPECT_EQ(bounds(layout, fill_drain(layout, Checkpoint::kAlways)), (Bounds{{3, 3}, {1, 1}}));
  EXPECT_EQ(bounds(layout, fill(layout)), (Bounds{{1, 1}, {0, 0}}));
  const auto longer = straight(4, 8);
  EXPECT_THAT(bounds(longer, make_schedule("1f1b", longer, Checkpoint::kNever))[0], ElementsAre(4, 3, 2, 1));
  EXPECT_THAT(bounds(longer, make_schedule("zb_h1", longer, Checkpoint::kNever))[0], ElementsAre(4, 4, 4, 4));
}

TEST(Verifier, RefusesWhatIsInvalid) {
  struct Case {
    Layout layout;
    std::vector<Edge> edges;
    Schedule schedule;
    std::string text;
  };
  const auto filled = fill(straight(3, 1));
  std::vector<Case> cases = {
      {{-1, 1, {}}, {}, {}, "-1 stages"},
      {{1, 0, {0}}, {}, lists({"0F0"}), "0 micro-batches"},
      {{2, 1, {0}}, {}, lists({"0F0"}), "1 entries"},
      {{1, 1, {-1}}, {}, lists({"0F0"}), "worker -1"},
      {{2, 1, {0, 2000000000}}, {}, lists({"0F0"}), "worker 2000000000"},
      {{3, 1, {0, 2, 2}}, {}, lists({"0F0"}), "worker 1 has no stage"},
      {{2, 1, {0, 1}}, {}, lists({"0F0"}), "1 lists"},
      {straight(3, 1), {{1, 1, "loop"}}, filled, "edge 0 ('loop', stage 1 to 1)"},
      {straight(3, 1), {{0, 1, ""}, {2, 1, "back"}}, filled, "edge 1 ('back', stage 2 to 1)"},
      {straight(3, 1), {{0, 3, ""}}, filled, "stage 0 to stage 3"},
      {straight(3, 1), {{-1, 2, ""}}, filled, "stage -1 to stage 2"},
      {straight(2, 1), chain(2), lists({"0F0 2F0", "1F0"}), "worker 0 has 2F0"},
      {straight(2, 1), chain(2), lists({"0F0", "1F0 1F1"}), "worker 1 has 1F1"},
      {straight(2, 1), chain(2), lists({"-1F0", "1F0"}), "worker 0 has -1F0"},
      {straight(2, 1), chain(2), lists({"0F-1", "1F0"}), "worker 0 has 0F-1"},
      {straight(2, 1), chain(2), lists({"0F0 1F0", ""}), "placed on worker 1"},
      {straight(2, 1), chain(2), lists({"0F0", "1F0 1B0"}), "lacks 0B0"},
      {straight(1, 2), {}, lists({"0F0 0F1 0B1 0B0 0B1"}), "0B1 twice"},
      {straight(2, 2), chain(2), lists({"0F0 0F1", "1F0"}), "lacks 1F1"},
  };
  for (const auto& [list, text] : std::vector<std::pair<std::string, std::string>>{
           {"0F0 0F0", "0F0 twice"},
           {"0F0 0R0 0R0 0B0", "0R0 twice"},
           {"0F0 0B0 0I0 0W0", "both 0B0 and 0I0"},
           {"0F0 0B0 0W0", "both 0B0 and 0W0"},
           {"", "lacks 0F0"},
           {"0B0", "lacks 0F0"},
           {"0F0 0I0", "lacks 0W0"},
           {"0F0 0W0", "lacks 0I0"},
           {"0F0 0R0", "no backward"},
           {"0B0 0F0", "0B0 stands before 0F0"},
           {"0R0 0F0 0B0", "0R0 stands before 0F0"},
           {"0F0 0B0 0R0", "0B0 stands before 0R0"},
           {"0F0 0W0 0I0", "0W0 stands before 0I0"},
           {"0F0 0I0 0R0 0W0", "0I0 stands before 0R0"},
       }) {
    cases.push_back({straight(1, 1), {}, lists({list}), text});
  }
  for (const auto& it : cases) {
    EXPECT_THAT(refusal(it.layout, it.edges, it.schedule), AllOf(HasSubstr(it.text), Not(HasSubstr("deadlocks"))));
  }
}

TEST(Verifier, DeadlockMessageNamesGradientsAndOmitsWorkersThatFinish) {
  const auto schedule = lists({"0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1", "2F0 2B0 2F1 2B1"});
  EXPECT_THAT(refusal(straight(3, 2), {{0, 1, "a"}, {1, 2, "b"}}, schedule),
              AllOf(HasSubstr("worker 0 waits to take the gradient of edge 0 ('a', stage 0 to 1) for 0B0"),
                    HasSubstr("worker 1 waits to take edge 0 ('a', stage 0 to 1) for 1F1"),
                    HasSubstr("worker 2 waits to take edge 1 ('b', stage 1 to 2) for 2F1")));
}

/// A second, simple implementation of rule 4: workers take turns until none can go on.
bool finishes(const Parts& parts) {
  std::set<std::tuple<bool, int, int>> sent;  // whether forward, from which stage, micro-batch
  const auto exchanges = [](const Action& action) { return action.kind != Kind::R && action.kind != Kind::W; };
  const auto can_run = [&](const Action& action) {
    const bool forward = action.kind == Kind::F;
    return !exchanges(action) || std::ranges::all_of(parts.edges, [&](const Edge& edge) {
      const auto [from, to] = forward ? std::pair(edge.from, edge.to) : std::pair(edge.to, edge.from);
      return to != action.stage || sent.contains({forward, from, action.micro_batch});
    });
  };
  std::vector<std::size_t> next(parts.schedule.size());
  for (bool moved = true; std::exchange(moved, false);) {
    for (std::size_t w = 0; w < next.size(); ++w) {
      const auto& list = parts.schedule[w];
      if (next[w] == list.size() || !can_run(list[next[w]])) continue;
      const auto& action = list[next[w]++];
      if (exchanges(action)) sent.insert({action.kind == Kind::F, action.stage, action.micro_batch});
      moved = true;
    }
  }
  return std::ranges::equal(next, parts.schedule, {}, {}, &std::vector<Action>::size);
}

TEST(Verifier, AgreesWithASimpleImplementationOnRandomPrograms) {
  std::mt19937_64 random(7);
  int accepted = 0;
  int refused = 0;
  for (int i = 0; i < 1500; ++i) {
    const auto parts = shuffled_parts(random);
    const auto error = refusal(parts.layout, parts.edges, parts.schedule);
    ASSERT_EQ(error.empty(), finishes(parts)) << error << to_text(parts.schedule);
    ++(error.empty() ? accepted : refused);
    EXPECT_THAT(error, ::testing::AnyOf("", HasSubstr("the schedule deadlocks")));
  }
  EXPECT_GT(accepted, 200);
  EXPECT_GT(refused, 200);
}

}  // namespace
}  // namespace gpipe::testing
