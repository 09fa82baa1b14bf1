// Transfers and sums between devices, and plans with replicas, from hand-written profiles.
#include "balance/network.h"

#include <cmath>

#include "balance/plan.h"
#include "balance/predict.h"
#include "balance/report.h"
#include "balance/stage_cost.h"
#include "gpipe/ranks/gradient_reduction.h"
#include "tests/balance/profiles.h"

namespace gpipe {
namespace {

/// A profile of equal layers for micro-batches of `samples`. Per sample a layer takes 1 s forward and 2 s backward, and
/// its output has 10 bytes. Its parameters have as many bytes as their gradients.
Profile equal_layers(int layers, int samples = 1, std::int64_t gradients = 0) {
  auto profile = chain(std::vector<double>(layers, samples));
  profile.samples = samples;
  for (auto& layer : profile.layers) {
    layer.input_gradient = layer.weight_gradient = samples;
    layer.parameters = layer.gradients = gradients;
    layer.output = 10 * samples;
  }
  return profile;
}

RunOptions run_on(const Network& network, int chunks, Scheduling scheduling = {}) {
  return {.chunks = chunks, .checkpoint = Checkpoint::kNever, .network = network, .scheduling = std::move(scheduling)};
}

TEST(Network, LinksAreInsideOnlyIfTheyAreForEveryReplica) {
  for (int replicas = 1; replicas <= 5; ++replicas) {
    for (int per_host = 1; per_host <= 9; ++per_host) {
      const Network network{replicas, per_host, {1, 0}, {2, 0}};
      const auto host = [&](int worker, int replica) { return (worker * replicas + replica) / per_host; };
      for (int a = 0; a < 5; ++a) {
        for (int b = 0; b < 5; ++b) {
          bool inside = true;
          for (int r = 0; r < replicas; ++r) inside = inside && host(a, r) == host(b, a == b ? 0 : r);
          EXPECT_EQ(&network.link(a, b), inside ? &network.inside : &network.between)
              << replicas << " replicas, " << per_host << " devices per host, workers " << a << " and " << b;
        }
      }
    }
  }
  const Network one_host{7, 0, {1, 0}, {2, 0}};
  EXPECT_EQ(&one_host.link(0, 1000), &one_host.inside);
}

TEST(Network, AReductionSendsThreeOfFourSharesTwice) {
  const Network network{4, 4, {.bandwidth = 100, .latency = 0.5}, {.bandwidth = 10, .latency = 1}};
  EXPECT_DOUBLE_EQ(network.reduction(0, 1000), 2 * (0.5 + 3 * 250 / 100.0));
  const Network spread{4, 2, network.inside, network.between};
  EXPECT_DOUBLE_EQ(spread.reduction(0, 1000), 2 * (1 + 3 * 250 / 10.0));
  EXPECT_EQ(network.reduction(0, 0), 0);
  EXPECT_EQ(Network{}.reduction(0, 1000), 0) << "a single replica";
}

TEST(Predict, AddsLatencyTransfersAndSumsOfGradients) {
  const Network link{.inside = {.bandwidth = 20, .latency = 0.25}};
  const Network hosts{1, 2, {}, {.latency = 5}};
  const Network slow{.inside = {.bandwidth = 5}};
  const Network pair{.replicas = 2, .devices_per_host = 2, .inside = {.bandwidth = 50, .latency = 0.25}};
  const Network immediate{.replicas = 2, .inside = {.bandwidth = 50}};
  const auto with_gradients = [&](std::int64_t first, std::int64_t last) {
    auto profile = equal_layers(2);
    profile.layers[0].gradients = first;
    profile.layers[1].gradients = last;
    return profile;
  };
  struct Case {
    Profile profile;
    RunOptions run;
    double seconds;
    double reduction = 0;
  };
  const Case cases[] = {
      // An activation takes 0.25 + 10 / 20 s. So worker 1 starts at 1.75 s and ends 3 + 6 s later. Its last gradient
      // takes 0.75 s, and worker 0's last backward 2 s.
      {equal_layers(2), run_on(link, 3), 1.75 + 3 + 6 + 0.75 + 2},
      // One of three cuts is between hosts.
      {equal_layers(4), run_on(hosts, 1), 4 * 3 + 2 * 5},
      // An activation takes 2 s. Worker 1 gets them at 3, 5 and 7 s, and its backwards end at 10, 12 and 14 s.
      {equal_layers(2), run_on(slow, 3), 14 + 2 + 2},
      // The backwards of worker 0 end at 12 s, the backwards of worker 1 at 10 s. Two replicas, on one host, send each gradient
      // once. The first one is hidden behind worker 0.
      {with_gradients(0, 50), run_on(pair, 3), 12},
      {with_gradients(0, 150), run_on(pair, 3), 10 + 2 * 0.25 + 150 / 50.0, 1.5},
      {with_gradients(100, 150), run_on(pair, 3), 12 + 2 * 0.25 + 100 / 50.0, 2.5},
      // Stage 1 is summed from 4 to 7 s, stage 0, whose backward ends at 6 s, from 7 to 10 s.
      {equal_layers(2, 1, 150), run_on(immediate, 1, {.placement = {0, 0}}), 10, 4},
  };
  for (const auto& it : cases) {
    const auto found = predict(it.profile, std::vector<std::int64_t>(it.profile.layers.size(), 1), it.run);
    EXPECT_DOUBLE_EQ(found.seconds, it.seconds);
    EXPECT_DOUBLE_EQ(found.reduction, it.reduction) << found.seconds;
  }
  const auto later = predict(with_gradients(0, 150), {1, 1}, run_on(pair, 3));
  EXPECT_DOUBLE_EQ(later.bubble, 1 - 2 * 9 / (2 * 13.5)) << "each worker works for 3 x 3 s";
}

TEST(Predict, CountsTheMemoryThatSumsGradients) {
  constexpr auto kMiB = std::int64_t{1} << 20;
  EXPECT_EQ(reduction_bytes(1, 1000, 1000), 0);
  EXPECT_EQ(reduction_bytes(4, 1000, 500), 1000) << "one bucket";
  EXPECT_EQ(reduction_bytes(2, 1024 * kMiB, 4 * kMiB), 8 * kMiB) << "the largest bucket";
  const auto profile = equal_layers(4, 1, 1000);
  const auto bytes = [&](int replicas, std::vector<int> placement) {
    return predict(profile, {1, 3}, run_on({.replicas = replicas}, 2, {.placement = std::move(placement)})).bytes;
  };
  const auto alone = bytes(1, {0, 1});
  EXPECT_THAT(bytes(2, {0, 1}), ElementsAre(alone[0] + 1000, alone[1] + 3000));
  EXPECT_THAT(bytes(2, {0, 0}), ElementsAre(bytes(1, {0, 0})[0] + 4000));
}

PlanOptions on_hosts(int hosts, int per_host, LinkSpeed inside, LinkSpeed between, std::int64_t samples) {
  PlanOptions options{.samples = samples,
                      .replicas = 0,
                      .network = {.devices_per_host = per_host, .inside = inside, .between = between},
                      .copies = true};
  for (int i = 0; i < hosts * per_host; ++i) options.devices.push_back("device " + std::to_string(i));
  return options;
}

TEST(PlanOfReplicas, WeighsSumsAgainstTheBubble) {
  // 8 samples on two devices. As one pipeline of two workers: (8 + 1) x 3 s. As two replicas: 4 x 2 x 3 s, and the
  // sums.
  auto profile = equal_layers(2, 1, 100);
  for (auto& layer : profile.layers) layer.output = 0;  // so that transfers take no time
  const auto best = [&](double bandwidth) {
    auto options = on_hosts(1, 2, {.bandwidth = bandwidth}, {.bandwidth = bandwidth}, 8);
    options.checkpoint = Checkpoint::kNever;
    auto plans = plan({profile}, options);
    std::erase_if(plans.plans, [](const Plan& plan) { return plan.schedule != "gpipe"; });
    return plans;
  };
  const auto fast = best(100);
  ASSERT_EQ(fast.plans.size(), 2U);
  EXPECT_EQ(fast.best().replicas, 2);
  EXPECT_EQ(fast.best().chunks, 4);
  EXPECT_DOUBLE_EQ(fast.best().seconds, 4 * 2 * 3 + 200 / 100.0);
  EXPECT_DOUBLE_EQ(fast.best().reduction, 2);
  EXPECT_DOUBLE_EQ(fast.plans[1].seconds, (8 + 1) * 3);
  EXPECT_EQ(fast.plans[1].reduction, 0);
  EXPECT_EQ(best(50).best().replicas, 1);
  EXPECT_DOUBLE_EQ(best(50).plans[1].seconds, 4 * 2 * 3 + 200 / 50.0);
  EXPECT_THAT(plan_table(fast), ContainsRegex("\ngpipe +2 +4 +none +26.0 s +8 % .* 2 +2.00 s\n"));
}

TEST(PlanOfReplicas, ChoosesTheSizeOfMicroBatches) {
  auto small = equal_layers(4, 1);
  auto large = equal_layers(4, 4);
  for (auto& layer : small.layers) layer.forward = layer.stored = 2;  // less efficient
  const auto of = [&](std::int64_t samples) {
    auto options = on_hosts(1, 4, {}, {}, samples);
    options.schedulings = {{"gpipe", 1, {0, 1, 2, 3}}};
    return plan({small, large}, options).best();
  };
  // 8 samples: (8 + 3) x 4 s in micro-batches of 1, (2 + 3) x 12 s in micro-batches of 4.
  EXPECT_EQ(of(8).chunks, 8);
  EXPECT_DOUBLE_EQ(of(8).seconds, 11 * 4);
  // 64 samples: (64 + 3) x 4 s, (16 + 3) x 12 s.
  EXPECT_EQ(of(64).chunks, 16);
  EXPECT_DOUBLE_EQ(of(64).seconds, 19 * 12);
}

TEST(PlanOfReplicas, TriesEachNumberAndKeepsToTheMemory) {
  const auto plans = [&](std::int64_t memory) {
    auto options = on_hosts(2, 2, {.bandwidth = 1e9}, {.bandwidth = 1e9}, 16);
    if (memory > 0) options.memory = {memory};
    return plan({equal_layers(4, 1, 1000)}, options);
  };
  EXPECT_EQ(plans(0).best().replicas, 4);
  std::set<int> replicas;
  for (const auto& each : plans(0).plans) {
    EXPECT_EQ(each.replicas * static_cast<int>(each.bytes.size()), 4);
    EXPECT_GE(each.seconds, 16 * 4 * 3 / 4.0) << "the work of a device";
    replicas.insert(each.replicas);
  }
  EXPECT_THAT(replicas, ElementsAre(1, 2, 4));
  const auto halves = plans(7000);
  EXPECT_EQ(halves.best().replicas, 2) << "two layers need 4000 bytes and 2000 for sums, four 8000 and 6000";
  EXPECT_LE(std::ranges::max(halves.best().bytes), 7000);
  EXPECT_FALSE(halves.plans.back().fits());
  EXPECT_EQ(halves.plans.back().replicas, 4);
  EXPECT_THAT(plan_table(halves), HasSubstr("too large"));
  EXPECT_EQ(plans(3000).best().replicas, 1);
  EXPECT_EQ(plans(1500).plans.front().replicas, 1) << "the one that needs the fewest bytes";
  EXPECT_THAT(plans(1500).reason, HasSubstr("layer 0 alone needs"));
}

TEST(Plan, RefusesWhatCannotBePlanned) {
  const std::pair<Network, std::string> networks[] = {
      {{.replicas = 0}, "replicas must be positive, but is 0"},
      {{.devices_per_host = -1}, "devices_per_host must not be negative, but is -1"},
      {{.inside = {.bandwidth = -1}}, "inside a host must not be negative, but are -1 bytes/s"},
      {{.between = {.latency = -1}}, "bandwidth and latency between hosts"},
      {{.between = {.latency = std::nan("")}}, "bandwidth and latency between hosts"}};
  for (const auto& it : networks) {
    EXPECT_THAT([&] { predict(equal_layers(2), {1, 1}, run_on(it.first, 2)); }, refused(it.second));
  }
  const std::vector<Profile> profiles = {equal_layers(4)};
  const auto good = on_hosts(2, 4, {}, {}, 8);
  const auto with = [&](auto PlanOptions::*member, auto value) {
    auto options = good;
    options.*member = value;
    return options;
  };
  using Bytes = std::vector<std::int64_t>;
  const std::tuple<std::vector<Profile>, PlanOptions, std::string> cases[] = {
      {{}, good, "give at least one profile"},
      {profiles, with(&PlanOptions::samples, 0), "samples must be positive, but is 0"},
      {profiles, with(&PlanOptions::devices, std::vector<std::string>()), "give at least one device"},
      {{equal_layers(4), equal_layers(5)}, good, "profiles have 4 and 5 layers"},
      {{equal_layers(4, 0)}, good, "at least one sample, but has 0"},
      {profiles, with(&PlanOptions::network, Network{.inside = {.bandwidth = -1}}), "must not be negative"},
      {profiles, with(&PlanOptions::memory, Bytes{-1}), "memory must be positive, but is -1"},
      {profiles, with(&PlanOptions::memory, Bytes{1, 2}), "2 sizes of memory for 8 devices"},
      // One pipeline would have 8 stages; 2, 4 and 8 replicas do not divide 9 samples.
      {profiles, with(&PlanOptions::samples, 9), "suits 8 devices, 9 samples"},
  };
  for (const auto& it : cases) {
    EXPECT_THAT([&] { plan(std::get<0>(it), std::get<1>(it)); }, refused(std::get<2>(it)));
  }
}

}  // namespace
}  // namespace gpipe
