// What workers wait for, and where the time of a step goes.
#include "gpipe/blame.h"

#include <nlohmann/json.hpp>

#include "gpipe/schedule/verifier.h"
#include "tests/runtime/generated_programs.h"

namespace gpipe::testing {
namespace {

using ::testing::IsEmpty;

constexpr double kRounding = 1e-9;

/// "work 1B0 2" for each piece, with the edge of a wire before the action.
std::vector<std::string> texts(const std::vector<Piece>& pieces) {
  const std::vector<std::string> causes = {"work", "queued", "blocked", "wire", "caller"};
  std::vector<std::string> texts;
  for (const auto& [cause, worker, action, edge, seconds] : pieces) {
    std::ostringstream text;
    text << causes[static_cast<int>(cause)];
    if (cause == Cause::kWire) text << " " << edge;
    if (cause != Cause::kCaller) text << " " << to_string(action);
    text << " " << std::round(seconds * 1e6) / 1e6;
    texts.push_back(text.str());
  }
  return texts;
}

/// Two stages, one micro-batch, and half a second for each transfer.
Timeline two_stages() {
  return {2,
          {{0, 1, "activation"}},
          {{0, action("0F0"), 10, 11},
           {0, action("0B0"), 15, 16},
           {1, action("1F0"), 11.5, 12.5},
           {1, action("1B0"), 12.5, 14.5}}};
}

/// Checks that waits and actions fill the time of all workers, and that the parts sum to it.
void expect_complete(const Timeline& timeline, const std::vector<StepBlame>& blamed) {
  for (const auto& step : blamed) {
    double seconds = 0;
    for (const auto& wait : step.waits) {
      double of_pieces = 0;
      for (const auto& piece : wait.pieces) {
        EXPECT_GT(piece.seconds, 0);
        of_pieces += piece.seconds;
      }
      EXPECT_NEAR(of_pieces, wait.end - wait.start, kRounding);
      seconds += of_pieces;
    }
    for (const auto& span : timeline.spans) {
      if (span.step == step.step) seconds += span.end - span.start + span.lead;
    }
    EXPECT_NEAR(seconds, timeline.workers * (step.end - step.start), kRounding);
    double of_parts = 0;
    for (const auto& [name, part] : step.parts) of_parts += part;
    EXPECT_NEAR(of_parts, step.end - step.start, kRounding);
  }
}

TEST(Blame, WalksBackFromEachWait) {
  const auto step = blame(two_stages()).at(0);
  expect_complete(two_stages(), {step});
  ASSERT_EQ(step.waits.size(), 3);
  EXPECT_THAT(texts(step.waits[0].pieces), ElementsAre("wire 0 1B0 0.5", "work 1B0 2", "work 1F0 1", "wire 0 0F0 0.5"));
  EXPECT_THAT(texts(step.waits[1].pieces), ElementsAre("wire 0 0F0 0.5", "work 0F0 1"));
  EXPECT_THAT(texts(step.waits[2].pieces), ElementsAre("work 0B0 1", "wire 0 1B0 0.5"));
  EXPECT_THAT(texts(step.critical_path),
              ElementsAre("work 0B0 1", "wire 0 1B0 0.5", "work 1B0 2", "work 1F0 1", "wire 0 0F0 0.5", "work 0F0 1"));
  EXPECT_EQ(step.waits[0].pieces[1].worker, 1);
  EXPECT_NEAR(step.replayed, 6, kRounding);
}

TEST(Blame, ReplaysTransfersThatVary) {
  const Timeline timeline{2,
                          {{0, 1, ""}},
                          {{0, action("0F0"), 0, 1},
                           {0, action("0F1"), 1, 2},
                           {0, action("0B0"), 6.5, 7.5},
                           {0, action("0B1"), 7.75, 8.75},
                           {1, action("1F0"), 1.5, 2.5},
                           {1, action("1B0"), 2.5, 4.5},
                           {1, action("1F1"), 4.5, 5.5},
                           {1, action("1B1"), 5.5, 7.5}}};
  const auto step = blame(timeline).at(0);
  expect_complete(timeline, {step});
  EXPECT_NEAR(step.replayed, 8.75, kRounding);
  EXPECT_THAT(step.transfers, ElementsAre(2));  // of 0.5 and 2, because 0B1 could also wait for 0B0
}

TEST(Blame, NamesTheCallerTheQueueAndTheLock) {
  auto timeline = two_stages();
  for (Span span : two_stages().spans) {
    span.step = 1;
    span.start += 8;  // two seconds after the first step
    span.end += 8;
    if (span.action == action("1B0")) span.queued = 0.5, span.blocked = 0.25;
    timeline.spans.push_back(span);
  }
  const auto step = blame(timeline).at(1);
  expect_complete(timeline, blame(timeline));
  EXPECT_NEAR(step.parts.at("caller"), 2, kRounding);
  EXPECT_THAT(texts(step.waits[0].pieces), ElementsAre("caller 2"));
  EXPECT_THAT(texts(step.waits[1].pieces), ElementsAre("wire 0 1B0 0.5", "blocked 1B0 0.25", "queued 1B0 0.5",
                                                       "work 1B0 1.25", "work 1F0 1", "wire 0 0F0 0.5"));
}

TEST(Blame, GivesTheCallerTheTimeBetweenForwardAndBackward) {
  const Timeline timeline{
      2,
      {{0, 1, ""}},
      {{0, action("0F0"), 0, 1}, {1, action("1F0"), 1, 2}, {1, action("1B0"), 5, 6}, {0, action("0B0"), 6, 7}}};
  const auto step = blame(timeline).at(0);
  expect_complete(timeline, {step});
  EXPECT_NEAR(step.parts.at("caller"), 3, kRounding);
  EXPECT_NEAR(step.replayed, 4, kRounding);
  EXPECT_THAT(texts(step.waits[0].pieces), ElementsAre("work 1B0 1", "caller 3", "work 1F0 1"));
}

/// A simulated step of four stages, of one each on as many workers.
Timeline of_four(const std::string& schedule, int micro_batches, std::vector<double> forwards, double transfer = 0,
                 Checkpoint checkpoint = Checkpoint::kNever) {
  const auto layout = straight(4, micro_batches);
  std::vector<Times> times;
  for (const double forward : forwards) times.push_back({forward, forward, 2 * forward, forward, forward});
  return simulated(layout, make_schedule(schedule, layout, checkpoint), times, transfer).timeline;
}

std::string largest_of(const Timeline& timeline) {
  auto parts = blame(timeline).back().parts;
  parts.erase("work");
  return std::ranges::max_element(parts, {}, [](const auto& part) { return part.second; })->first;
}

TEST(Blame, NamesTheCauseThatCostsMost) {
  EXPECT_EQ(largest_of(of_four("1f1b", 4, {1, 1, 1, 1})), "schedule");
  EXPECT_EQ(largest_of(of_four("1f1b", 32, {1, 1, 3, 1})), "imbalance");
  EXPECT_EQ(largest_of(of_four("1f1b", 32, {1, 1, 1, 1}, 0, Checkpoint::kAlways)), "recompute");
  EXPECT_EQ(largest_of(of_four("1f1b", 16, {1, 1, 1, 1}, 3)), "wires");
  for (const std::string cause : {"cores", "locks", "jitter"}) {
    auto timeline = of_four("1f1b", 16, {1, 1, 1, 1});
    const auto layout = straight(4, 16);
    const auto program = plain_program(layout, make_schedule("1f1b", layout, Checkpoint::kNever));
    const auto seconds = [&](const Action& it) {
      const double more = cause == "jitter" ? (it == action("2F7") ? 30 : 0) : 2;
      return (it.kind == Kind::F ? 1 : 2) + more;
    };
    timeline.spans.clear();
    const auto run = replay(layout, program.edges(), program.wiring(), program.schedule(), seconds, {0, 0, 0});
    for (const auto& spans : run.spans) timeline.spans.insert(timeline.spans.end(), spans.begin(), spans.end());
    for (auto& span : timeline.spans) (cause == "cores" ? span.queued : span.blocked) = cause == "jitter" ? 0 : 2;
    EXPECT_EQ(largest_of(timeline), cause);
  }
}

TEST(Blame, SlackSaysHowMuchSlowerAnActionMayBe) {
  const auto slack = blame(of_four("1f1b", 8, {1, 1, 2, 1})).back().slack;
  std::map<std::pair<int, Kind>, Slack> found;
  for (const auto& each : slack) found[{each.stage, each.kind}] = each;
  EXPECT_EQ(found.size(), 8);
  EXPECT_LT(found.at({2, Kind::B}).slower, 0.01);
  EXPECT_GT(found.at({2, Kind::B}).gain, 2);  // 8 of 4 s, a tenth less
  EXPECT_GT(found.at({3, Kind::B}).gain, 0);
  EXPECT_LT(found.at({3, Kind::B}).gain, found.at({2, Kind::B}).gain);
}

TEST(Blame, LeavesOutStepsThatHaveFailed) {
  auto timeline = two_stages();
  timeline.spans.push_back({0, action("0F0"), 20, 21, 1});
  const auto steps = blame(timeline);
  ASSERT_EQ(steps.size(), 1);
  EXPECT_EQ(steps[0].step, 0);
  EXPECT_THAT(blame({}), IsEmpty());
}

TEST(Blame, HasTheReplicasBesideEachOther) {
  auto timeline = two_stages();
  timeline.replicas = 2;
  timeline.workers = 4;
  for (Span span : two_stages().spans) {
    span.worker += 2;
    span.start += span.worker == 3 ? 0.25 : 0;
    span.end += 0.25;
    timeline.spans.push_back(span);
  }
  const auto step = blame(timeline).at(0);
  expect_complete(timeline, {step});
  EXPECT_THAT(texts(step.waits.back().pieces), ElementsAre("work 0B0 1.25", "wire 0 1B0 0.25"));
  EXPECT_EQ(step.waits.back().pieces[0].worker, 2);
}

TEST(Blame, OfRandomProgramsIsCompleteAndReplaysThem) {
  const auto seeds = seeds_from_environment(60);
  for (auto seed = seeds.first; seed < seeds.first + seeds.count && !HasFailure(); ++seed) {
    std::mt19937_64 random(seed);
    const auto generated = generate(random);
    SCOPED_TRACE("seed " + std::to_string(seed) + ": " + describe(generated));
    const auto& program = generated.program;
    const auto seconds = [&](const Action& it) {
      return 1 + draw(random, 0, 100) / 50.0 + (it.stage == 0 ? draw(random, 0, 3) : 0);
    };
    const std::vector<double> transfers(program.edges().size(), draw(random, 0, 1) * draw(random, 1, 20) / 10.0);
    const auto run =
        replay(program.layout(), program.edges(), program.wiring(), program.schedule(), seconds, transfers);
    Timeline timeline{program.workers(), program.edges(), {}};
    for (const auto& spans : run.spans) timeline.spans.insert(timeline.spans.end(), spans.begin(), spans.end());
    for (auto& span : timeline.spans) span.queued = span.blocked = draw(random, 0, 4) / 10.0 * (span.end - span.start);
    const auto blamed = blame(timeline);
    ASSERT_EQ(blamed.size(), 1);
    expect_complete(timeline, blamed);
    EXPECT_NEAR(blamed[0].replayed, timeline.makespan() - blamed[0].parts.at("caller"), kRounding);
    double work = 0;
    for (const auto& piece : blamed[0].critical_path) work += piece.seconds;
    EXPECT_NEAR(work, timeline.makespan(), kRounding);
    EXPECT_NEAR(timeline.makespan(), blamed[0].end - blamed[0].start, kRounding);
  }
}

TEST(JsonLines, HaveAStepEach) {
  auto timeline = two_stages();
  timeline.spans[0].bytes = {1, 3, 2};
  const auto text = to_json_lines(timeline);
  EXPECT_EQ(std::ranges::count(text, '\n'), 1);
  const auto line = nlohmann::json::parse(text);
  EXPECT_EQ(line.at("workers"), 2);
  EXPECT_EQ(line.at("edges"), (nlohmann::json{{0, 1, "activation"}}));
  EXPECT_EQ(line.at("spans")[0], (nlohmann::json{0, 0, "F", 0, 10., 11., 0., 0., 0., 1, 3, 2}));
  EXPECT_EQ(line.at("waits").size(), 3);
  EXPECT_EQ(line.at("waits")[1][3][0], (nlohmann::json{"wire", 0, 0, "F", 0, 0, 0.5}));
  EXPECT_EQ(line.at("slack").size(), 4);
  EXPECT_EQ(line.at("gains").at("schedule='1f1b'"), 0);
  EXPECT_EQ(line.at("advice"), (nlohmann::json::array({{"chunks=2", 1.5, 1.5, 1.5}})));
}

}  // namespace
}  // namespace gpipe::testing
