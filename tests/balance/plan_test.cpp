// Cuts, predictions and suggestions from hand-written profiles, without a model.

#include <algorithm>
#include <functional>
#include <numeric>
#include <optional>
#include <random>

#include "balance/cut.h"
#include "balance/plan.h"
#include "balance/predict.h"
#include "balance/report.h"
#include "balance/stage_cost.h"
#include "tests/balance/profiles.h"

namespace gpipe {
namespace {

using ::testing::UnorderedElementsAre;

TEST(Cut, KeepsLayersThatShareAParameterTogether) {
  auto profile = chain({1, 1, 1, 1});
  EXPECT_THAT(balance_by_time(profile, 2), ElementsAre(2, 2));
  profile.layers[2].shares_with = 1;
  EXPECT_THAT(balance_by_time(profile, 2), ElementsAre(3, 1));
  EXPECT_THAT(balance_by_time(profile, 3), ElementsAre(1, 2, 1));
  EXPECT_THAT([&] { balance_by_time(profile, 4); },
              refused("4 stages would separate layers that share a buffer or parameter"));
}

TEST(Cut, DependsOnSizeOrBandwidth) {
  auto with_parameters = chain({1, 1, 1, 1});
  EXPECT_THAT(balance_by_size(with_parameters, 2, {.chunks = 8}), ElementsAre(2, 2));
  with_parameters.layers[0].parameters = 1000;
  EXPECT_THAT(balance_by_size(with_parameters, 2, {.chunks = 8}), ElementsAre(1, 3));
  // A skip from the first to the third of equal layers: a cut after the third sends fewer bytes.
  auto profile = chain({1, 1, 1, 0.9});
  profile.skips = {{"skip", 0, {2}, 4000}};
  EXPECT_THAT(balance_by_time(profile, 2), ElementsAre(2, 2));
  const RunOptions run{.chunks = 2, .network = {.inside = {.bandwidth = 1000}}};
  EXPECT_THAT(balance_by_time(profile, 2, run), ElementsAre(3, 1));
  EXPECT_LT(predict(profile, {3, 1}, run).seconds, predict(profile, {2, 2}, run).seconds)
      << "the skip's transfer takes longer than the difference between the stages";
}

TEST(Predict, TransfersWithinAWorkerTakeNoTime) {
  const auto seconds = [](std::vector<int> placement, double bandwidth) {
    const RunOptions run{.chunks = 2,
                         .network = {.inside = {.bandwidth = bandwidth}},
                         .scheduling = {.placement = std::move(placement)}};
    return predict(chain({1, 1, 1, 1}), {1, 1, 1, 1}, run).seconds;
  };
  EXPECT_DOUBLE_EQ(seconds({0, 0, 0, 0}, 1), seconds({0, 0, 0, 0}, 0));
  EXPECT_LT(seconds({0, 0, 1, 1}, 1), seconds({0, 1, 0, 1}, 1));
}

TEST(Cut, KnowsTheBytesOfEachCut) {
  auto profile = chain({1, 1, 1, 1, 1, 1});
  for (std::size_t i = 0; i < profile.layers.size(); ++i) profile.layers[i].output = static_cast<std::int64_t>(i + 1);
  profile.skips = {{"near", 0, {2}, 100}, {"far", 1, {4}, 200}};
  profile.ties = {{"w", {1, 2, 5}, 10000}};
  profile.layers[3].shares_with = 2;
  EXPECT_THAT(cut_bytes(profile),
              ElementsAre(1 + 100, 2 + 100 + 200 + 10000, std::nullopt, 4 + 200 + 10000, 5 + 10000, std::nullopt));
  // The only cut of two stages sends all that runs along its edges.
  const StageCost stage(profile);
  for (const int layers : {1, 2, 4, 5}) {
    const auto of_edges = stage.edges({layers, 6 - layers}, {}).bytes;
    EXPECT_EQ(cut_bytes(profile)[layers - 1], std::accumulate(of_edges.begin(), of_edges.end(), std::int64_t{0}));
  }
  EXPECT_THAT(profile_table(profile, {2, 4}),
              AllOf(ContainsRegex("1 +l1 .* 10.1 KiB +<- cut here\n"), ContainsRegex("2 +l2 .* -\n"),
                    ContainsRegex("3 +l3 .* 9.96 KiB\n")));
  EXPECT_THAT(profile_table(profile), Not(HasSubstr("cut here")));
}

TEST(StageCost, CountsASkipOncePerReadingWorker) {
  auto profile = chain({1, 1, 1, 1});
  profile.skips = {{"skip", 0, {1, 2, 3}, 1000}};
  const StageCost stage(profile);
  EXPECT_EQ(stage.bytes_in(2, 4) - stage.bytes_in(2, 3), 0);
  const auto crossing = [&](const std::vector<int>& placement) {
    const auto run = RunOptions{.chunks = 2, .scheduling = {"gpipe", 1, placement}};
    return predict(profile, {1, 1, 1, 1}, run).crossing;
  };
  const auto activations = 2 * (profile.layers[0].output + profile.layers[1].output + profile.layers[2].output);
  EXPECT_EQ(crossing({0, 1, 2, 3}), activations + 2 * 3000);
  EXPECT_EQ(crossing({0, 1, 0, 1}), activations + 2 * 1000);
  EXPECT_EQ(crossing({0, 1, 1, 0}), activations - 2 * 10 + 2 * 1000) << "a V keeps it on its workers";
}

TEST(StageCost, CountsTiesOncePerStage) {
  auto profile = chain({1, 1, 1, 1});
  profile.ties = {{"w", {0, 2, 3}, 1000}};
  const StageCost stage(profile);
  const auto loans = [&](const std::vector<std::int64_t>& balance) {
    std::vector<std::pair<int, int>> found;
    const auto [edges, bytes] = stage.edges(balance, {});
    EXPECT_EQ(bytes.size(), edges.size());
    for (std::size_t i = balance.size() - 1; i < edges.size(); ++i) {
      EXPECT_EQ(edges[i].name, "parameter w");
      EXPECT_EQ(bytes[i], 1000);
      found.emplace_back(edges[i].from, edges[i].to);
    }
    return found;
  };
  EXPECT_THAT(loans({4}), IsEmpty());
  EXPECT_THAT(loans({3, 1}), ElementsAre(std::pair(0, 1)));
  EXPECT_THAT(loans({1, 1, 2}), ElementsAre(std::pair(0, 2)));
  EXPECT_THAT(loans({2, 1, 1}), ElementsAre(std::pair(0, 1), std::pair(0, 2)));
  EXPECT_EQ(stage.bytes_in(0, 4), 0);
  EXPECT_EQ(stage.bytes_in(1, 2), 10);
  EXPECT_EQ(stage.bytes_in(1, 4), 1010);
  EXPECT_EQ(stage.bytes_in(2, 4), 1010);
  EXPECT_EQ(stage.bytes_in(3, 4), 1010);
}

TEST(Predict, SendsTiedParametersWithEachMicroBatch) {
  auto profile = chain({1, 1, 1, 1});
  const RunOptions run{.chunks = 2, .network = {.inside = {.bandwidth = 1000}}, .copies = true};
  const auto before = predict(profile, {2, 2}, run);
  profile.ties = {{"w", {0, 3}, 4000}};
  const auto tied = predict(profile, {2, 2}, run);
  EXPECT_GT(tied.seconds, before.seconds + 4);
  EXPECT_GE(tied.bytes[1], before.bytes[1] + 2 * 4000) << "the last stage holds a copy per micro-batch";
}

TEST(Predict, CountsCopiesForTheReceiver) {
  const auto profile = chain({1, 1, 1, 1});
  for (const auto checkpoint : {Checkpoint::kNever, Checkpoint::kAlways}) {
    RunOptions run{.chunks = 3, .checkpoint = checkpoint};
    const auto shared = predict(profile, {2, 2}, run);
    run.copies = true;
    const auto copied = predict(profile, {2, 2}, run);
    EXPECT_EQ(copied.seconds, shared.seconds);
    EXPECT_LE(copied.bytes[0], shared.bytes[0]);
    EXPECT_EQ(copied.bytes[1], shared.bytes[1] + 3 * 10) << "the receiver holds one activation per micro-batch";
  }
}

TEST(StageCost, NearBalancesDifferInOneCut) {
  auto profile = chain({1, 1, 1, 1, 1});
  profile.layers[2].shares_with = 1;
  const StageCost stage(profile);
  EXPECT_THAT(stage.near({1, 3, 1}), UnorderedElementsAre(ElementsAre(3, 1, 1), ElementsAre(1, 2, 2)));
  EXPECT_THAT(stage.near({5}), IsEmpty());
}

TEST(Predict, SimulatesAStep) {
  const auto profile = chain({1, 1});
  const auto never = predict(profile, {1, 1}, {.chunks = 3, .checkpoint = Checkpoint::kNever});
  EXPECT_DOUBLE_EQ(never.seconds, (3 + 1) * 3);
  EXPECT_DOUBLE_EQ(never.bubble, 0.25);
  EXPECT_THAT(never.stages, ElementsAre(3, 3));
  const auto always = predict(profile, {1, 1}, {.chunks = 3, .checkpoint = Checkpoint::kAlways});
  EXPECT_THAT(always.stages, ElementsAre(4, 4));
  // The first stage's outputs live until the second stage's backwards. Each of its own backwards leaves a gradient for
  // the caller.
  EXPECT_EQ(never.bytes[0], 30);
  const std::vector<std::int64_t> other = {1, 2};
  EXPECT_THAT([&] { predict(profile, other); }, refused("balance [1, 2] sums to 3, but the model has 2 layers"));
  EXPECT_THROW(predict(profile, {2, 0}), std::invalid_argument);
  EXPECT_THROW(predict(profile, {1, 1}, {.chunks = 0}), std::invalid_argument);
  EXPECT_THROW(balance_by_size(profile, 2, {.chunks = 0}), std::invalid_argument);
  EXPECT_THROW(balance_by_time(profile, 2, {.network = {.inside = {.bandwidth = -1}}}), std::invalid_argument);
}

TEST(Predict, FollowsTheSchedule) {
  const auto profile = chain({1, 1, 1, 1});
  const auto of = [&](std::vector<std::int64_t> balance, Scheduling scheduling) {
    return predict(profile, balance, {.chunks = 8, .checkpoint = Checkpoint::kNever, .scheduling = scheduling});
  };
  const auto plain = of({2, 2}, {});
  const auto gpipe = of({2, 2}, {"gpipe"});
  const auto alternating = of({2, 2}, {"1f1b"});
  EXPECT_DOUBLE_EQ(gpipe.seconds, plain.seconds);
  EXPECT_DOUBLE_EQ(alternating.seconds, plain.seconds);
  EXPECT_LT(4 * alternating.bytes[1], gpipe.bytes[1] + 4 * 10) << "one cell at once instead of eight";
  EXPECT_EQ(alternating.timeline.workers, 2);
  for (const auto& looped : {of({1, 1, 1, 1}, {"looped_bfs", 2}), of({1, 1, 1, 1}, {"interleaved_1f1b", 2})}) {
    EXPECT_LT(looped.seconds, plain.seconds);
    EXPECT_THAT(looped.placement, ElementsAre(0, 1, 0, 1));
    EXPECT_EQ(looped.bytes.size(), 2U);
    EXPECT_EQ(looped.stages.size(), 4U);
    EXPECT_THAT(prediction_table(looped), AllOf(HasSubstr("worker"), ContainsRegex("2 +2-2 +0 +")));
  }
  EXPECT_THAT(of({1, 1, 1, 1}, {"gpipe", 1, {0, 1, 1, 0}}).placement, ElementsAre(0, 1, 1, 0));
  const auto refusal = [&](Scheduling scheduling) {
    return error_of<std::invalid_argument>([&] { of({2, 2}, scheduling); });
  };
  EXPECT_THAT(refusal({"zb_v", 1, {0, 1}}), HasSubstr("the V placement"));
  EXPECT_THAT(refusal({"gpipe", 3}), HasSubstr("which stages_per_worker = 3 does not divide"));
}

TEST(Plan, FindsTheSchedule) {
  auto profile = chain({1, 1, 1, 1, 1, 1, 1, 1});
  profile.input_requires_grad = true;
  for (auto& layer : profile.layers) layer.input_gradient = layer.weight_gradient = 1;
  const auto any = [&](std::vector<std::int64_t> memory) {
    return plan({profile},
                {.samples = 16, .devices = {"a", "b"}, .memory = std::move(memory), .checkpoint = Checkpoint::kNever});
  };
  const auto free = any({});
  // Two workers with 4 * 4 layers' work of 3 s each, and one F that worker 1 waits for.
  EXPECT_DOUBLE_EQ(free.best().seconds, 4 * 4 * 3 + 2);
  for (const auto& plan : free.plans) {
    EXPECT_EQ(plan.chunks, 4);
    if (plan.schedule == "gpipe" && plan.balance.size() == 2) EXPECT_DOUBLE_EQ(plan.seconds, 5 * 12);
    if (plan.schedule == "zb_h1") EXPECT_DOUBLE_EQ(plan.seconds, 4 * 12 + 4);
  }
  const auto most = std::ranges::max(free.best().bytes);
  const auto limited = any({most - 1});
  ASSERT_TRUE(limited.fits());
  EXPECT_LT(std::ranges::max(limited.best().bytes), most);
  EXPECT_GE(limited.best().seconds, free.best().seconds);
  EXPECT_THAT(plan_table(free), AllOf(HasSubstr("zb_v"), HasSubstr("lists, V"), HasSubstr("crossing")));
  EXPECT_THAT(any({1}).reason, HasSubstr("nothing fits: the plan that lacks least"));
}

TEST(Plan, FindsBalanceAndChunksAndKeepsWhatIsGiven) {
  auto whole = chain({4, 4, 4, 4});
  whole.samples = 8;
  const auto found =
      plan({whole, chain({2, 2, 2, 2})}, {.samples = 8, .devices = {"a", "b"}, .schedulings = {{"1f1b", 1, {0, 1}}}});
  EXPECT_EQ(found.best().chunks, 2);
  EXPECT_EQ(found.best().checkpoint, Checkpoint::kNever);
  EXPECT_THAT(found.best().balance, ElementsAre(2, 2));

  const auto profile = chain({1, 1, 1, 1, 1, 1});
  PlanOptions options{.samples = 16, .devices = {"a", "b"}, .memory = {400}, .balance = {4, 2}};
  for (const auto& each : plan({profile}, options).plans) {
    EXPECT_THAT(each.balance, ElementsAre(4, 2));
    EXPECT_LE(std::ranges::max(each.bytes), each.fits() ? 400 : 1000);
  }
  options.checkpoint = Checkpoint::kAlways;
  options.schedulings = {{"1f1b", 1, {0, 1}}};
  const auto plans = plan({profile}, options);
  ASSERT_EQ(plans.plans.size(), 1U);
  EXPECT_EQ(plans.best().checkpoint, Checkpoint::kAlways);
  EXPECT_EQ(plans.best().schedule, "1f1b");
}

/// A profile of layers of random times and sizes.
Profile random_chain(std::mt19937& random, int layers) {
  std::vector<double> seconds;
  for (int i = 0; i < layers; ++i) seconds.push_back(1e-3 * (1 + static_cast<double>(random() % 20)));
  auto profile = chain(seconds);
  for (auto& layer : profile.layers) {
    layer.parameters = layer.gradients = static_cast<std::int64_t>(random() % 50);
    layer.input_gradient = layer.weight_gradient = layer.backward / 2;
  }
  for (auto& block : profile.blocks) {
    if (block.born == Kind::F) block.bytes = static_cast<std::int64_t>(1 + random() % 5000);
  }
  for (std::size_t i = 0; i < profile.layers.size(); ++i) profile.layers[i].output = profile.blocks[2 * i].bytes;
  return profile;
}

/// Plans for one worker less memory each time. Calls `check` with the limit and the plans, until nothing fits.
void for_each_limit(const Profile& profile, PlanOptions options,
                    const std::function<void(std::int64_t limit, const Plans& plans)>& check) {
  auto limit = std::ranges::max(plan({profile}, options).best().bytes);
  for (;; limit -= std::max<std::int64_t>(1, limit / 16)) {
    options.memory = {limit};
    const auto plans = plan({profile}, options);
    if (!plans.fits()) return;
    check(limit, plans);
  }
}

TEST(Plan, MemoryIsADial) {
  std::mt19937 random(5);
  for (int trial = 0; trial < 6; ++trial) {
    const auto profile = random_chain(random, 12);
    double before = 0;
    int limits = 0;
    double saved = 0;
    for_each_limit(profile, {.samples = 32, .devices = {"a", "b"}, .schedulings = {{"1f1b", 1, {0, 1}}}},
                   [&](std::int64_t limit, const Plans& plans) {
                     ++limits;
                     EXPECT_LE(std::ranges::max(plans.best().bytes), limit);
                     EXPECT_GE(plans.best().seconds, before / 1.08) << "less memory hardly takes less time";
                     if (before > 0) saved += plans.more_memory_saves;
                     before = std::max(before, plans.best().seconds);
                   });
    EXPECT_GT(limits, 4);
    EXPECT_GT(saved, 0);
  }
}

TEST(Plan, RecomputesOnlyForMemory) {
  std::mt19937 random(4);
  for (int trial = 0; trial < 6; ++trial) {
    auto profile = random_chain(random, 12);
    for (auto& layer : profile.layers) layer.stored = 0.9 * layer.forward;
    PlanOptions options{.samples = 32, .devices = {"a", "b"}, .schedulings = {{"zb_v", 2, {0, 1, 1, 0}}}};
    const auto most = std::ranges::max(plan({profile}, options).best().bytes);
    for (const double part : {0.8, 0.9, 100.0}) {
      options.memory = {static_cast<std::int64_t>(part * static_cast<double>(most))};
      const auto best = plan({profile}, options).best();
      const bool recomputes = best.checkpoint != Checkpoints();
      EXPECT_TRUE(part < 1 || !recomputes);
      EXPECT_TRUE(recomputes || best.placement == options.schedulings[0].placement);
    }
  }
}

/// The fastest of all cuts, and all segments that are recomputed always, under 1f1b.
double fastest_of_all(const Profile& profile, int chunks, int workers, std::int64_t limit) {
  const int layers = static_cast<int>(profile.layers.size());
  double fastest = std::numeric_limits<double>::infinity();
  // Between two layers: 0 goes on, 1 begins a segment, 2 a stage. Then, by segment, whether it is recomputed.
  std::vector<int> between(layers - 1);
  for (std::size_t i = 0; i < between.size();) {
    if (std::ranges::count(between, 2) == workers - 1) {
      std::vector<std::int64_t> balance = {1};
      std::vector<int> placement = {0};
      for (const int each : between) {
        each == 0 ? void(++balance.back()) : balance.push_back(1);
        if (each > 0) placement.push_back(placement.back() + (each == 2 ? 1 : 0));
      }
      for (unsigned set = 0; set < 1U << balance.size(); ++set) {
        std::vector<Checkpoint> modes;
        bool is_needless = false;  // neighbours that are not recomputed are one segment
        for (std::size_t s = 0; s < balance.size(); ++s) {
          modes.push_back((set >> s & 1) != 0 ? Checkpoint::kAlways : Checkpoint::kNever);
          is_needless |= s > 0 && placement[s] == placement[s - 1] && (set >> (s - 1) & 3) == 0;
        }
        if (is_needless) continue;
        const auto found =
            predict(profile, balance, {.chunks = chunks, .checkpoint = modes, .scheduling = {"1f1b", 1, placement}});
        if (std::ranges::max(found.bytes) <= limit) fastest = std::min(fastest, found.seconds);
      }
    }
    for (i = 0; i < between.size() && ++between[i] == 3; ++i) between[i] = 0;
  }
  return fastest;
}

TEST(Plan, IsNearTheBestOfAll) {
  std::mt19937 random(7);
  std::vector<double> ratios;
  for (int trial = 0; trial < 10; ++trial) {
    const auto profile = random_chain(random, 5);
    for_each_limit(profile, {.samples = 16, .devices = {"a", "b"}, .schedulings = {{"1f1b", 1, {0, 1}}}},
                   [&](std::int64_t limit, const Plans& plans) {
                     const double fastest = fastest_of_all(profile, 4, 2, limit);
                     ratios.push_back(plans.best().seconds / fastest);
                     EXPECT_LE(plans.least_seconds, fastest);
                     EXPECT_GT(plans.least_seconds, 0.5 * fastest);
                   });
  }
  std::ranges::sort(ratios);
  EXPECT_LE(ratios[ratios.size() / 2], 1.0001);
  EXPECT_LE(ratios[ratios.size() * 9 / 10], 1.01);
}

TEST(Plan, IsNeverFasterThanItsBound) {
  std::mt19937 random(3);
  for (int trial = 0; trial < 40; ++trial) {
    auto profile = random_chain(random, 6);
    for (auto& layer : profile.layers) {
      layer.stored = layer.forward / static_cast<double>(1 + random() % 4);
      layer.input_gradient = 1e-3 * static_cast<double>(random() % 20);
      layer.weight_gradient = 1e-3 * static_cast<double>(random() % 20);
    }
    for (const auto checkpoint : {Checkpoint::kNever, Checkpoint::kAlways}) {
      const auto plans = plan({profile}, {.samples = 8, .devices = {"a", "b", "c"}, .checkpoint = checkpoint});
      EXPECT_GT(plans.least_seconds, 0);
      for (const auto& each : plans.plans) EXPECT_GE(each.seconds, plans.least_seconds * 0.999);
    }
  }
}

TEST(Plan, BoundKnowsThatNoWorkerHasPartOfALayer) {
  const PlanOptions options{.samples = 8, .devices = {"a", "b"}};
  const auto bound = [&](const std::vector<double>& forwards) {
    return plan({chain(forwards)}, options).least_seconds;
  };
  EXPECT_NEAR(bound({2, 2, 2, 2, 2}), bound({3, 3, 3, 3}), 1e-9);  // three layers on a worker
  EXPECT_NEAR(bound({1, 1, 7, 1}), bound({4, 3, 3, 4}), 1e-9);
}

TEST(Plan, ExplainsWhyNothingFits) {
  auto profile = chain({1, 1, 1, 1});
  for (auto& layer : profile.layers) layer.parameters = 10 << 20;
  const PlanOptions options{.samples = 8, .devices = {"device 0", "device 1"}, .memory = {15 << 20}};
  const auto needs_more = plan({profile}, options);
  ASSERT_FALSE(needs_more.fits());
  EXPECT_THAT(needs_more.reason, HasSubstr("needs 20.0 MiB on device 0, which has 15.0 MiB, 5.00 MiB too few"));
  EXPECT_THAT(needs_more.reason, HasSubstr("use 4 devices, or give the device more memory"));
  EXPECT_THAT(error_of([&] { needs_more.best(); }), HasSubstr("nothing fits"));
  auto less = options;
  less.memory = {5 << 20};
  EXPECT_THAT(plan({profile}, less).reason, HasSubstr("layer 0 alone needs 10.0 MiB"));
}

TEST(StageCost, RefusesNumbersThatOverflow) {
  constexpr auto kHuge = std::numeric_limits<std::int64_t>::max();
  auto profile = chain({1, 1, 1, 1});
  const std::vector<std::int64_t> wraps = {kHuge, kHuge, 6};  // their sum is 4 in 64 bits
  EXPECT_THAT([&] { predict(profile, wraps); }, refused("sums to more than"));
  EXPECT_THAT([&] { profile_table(profile, wraps); }, refused("sums to more than"));
  EXPECT_THAT([&] { StageCost(profile).near(wraps); }, refused("sums to more than"));
  const RunOptions many{.chunks = std::numeric_limits<int>::max()};
  EXPECT_THAT([&] { predict(profile, {2, 2}, many); }, refused("2147483647 micro-batches"));
  for (auto& block : profile.blocks) block.bytes = std::int64_t{10} << 30;
  EXPECT_THAT([&] { balance_by_size(profile, 2, many); }, refused("bytes overflow"));
  profile.layers[0].parameters = profile.layers[1].parameters = kHuge;
  EXPECT_THAT([&] { balance_by_size(profile, 2); }, refused(", overflows"));
  EXPECT_THAT([&] { profile_from_json(profile_to_json(profile)); }, refused("/layers/0/parameters"));
}

TEST(Report, ComparesPlansWithOneDevice) {
  const Plan pipeline{{.balance = {1, 1, 2}, .placement = {0, 0, 1}, .seconds = 1, .bytes = {100, 300}},
                      /*chunks=*/4,
                      Checkpoints({Checkpoint::kAlways, Checkpoint::kNever, Checkpoint::kNever}),
                      "1f1b"};
  Plans plans{.plans = {pipeline, pipeline}, .least_seconds = 0.75, .more_memory_saves = 0.002};
  EXPECT_THAT(plan_table(plans), AllOf(HasSubstr("No plan takes less than 750 ms, 75 % of the first one's step.\n"),
                                       HasSubstr("5 % more memory on each device, a step would take 2.00 ms less.\n"),
                                       Not(HasSubstr("speed-up"))));
  plans.unpartitioned = Plan{{.balance = {4}, .placement = {0}, .seconds = 0.5, .bytes = {900}}};
  plans.unpartitioned->missing = 100;
  const auto advice = HasSubstr("is predicted to be 2.00 times as fast.\n");
  EXPECT_THAT(plan_table(plans),
              AllOf(ContainsRegex("1f1b +2,2 +4 +1 of 4 layers +1.00 s +0 % +300 B +0 B +0.50\n"),
                    ContainsRegex(" 4 +1 +none +500 ms +0 % +900 B +0 B +1.00 +one device, too large\n"), Not(advice)));
  plans.unpartitioned->missing = 0;
  EXPECT_THAT(plan_table(plans), advice);
  auto prediction = predict(chain({1, 1}), {1, 1});
  EXPECT_THAT(prediction_table(prediction), AllOf(HasSubstr("\nstep: "), HasSubstr("bubble: share of")));
  prediction.placement.pop_back();
  EXPECT_THAT([&] { prediction_table(prediction); }, refused("balance 2, seconds 2, placement 1"));
}

}  // namespace
}  // namespace gpipe
