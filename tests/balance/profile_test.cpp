// Profiles, suggestions and predictions of real models. Compares bytes, never times.
#include <torch/torch.h>

#include <set>

#include "balance/balance.h"
#include "balance/layer_times.h"
#include "balance/measurement.h"
#include "balance/plan_model.h"
#include "balance/predict.h"
#include "balance/stage_cost.h"
#include "balance/trial.h"
#include "gpipe/nested.h"
#include "gpipe/schedule_source.h"
#include "gpipe/schedules.h"
#include "models/resnet.h"
#include "models/unet.h"
#include "tests/gpipe/instruments.h"
#include "tests/gpipe/layers.h"

namespace gpipe {
namespace {

namespace nn = torch::nn;

ProfileOptions brief() { return ProfileOptions().seconds(0).repeats(1); }

torch::Tensor rows(std::int64_t count = 4) { return torch::randn({count, 6}); }

const std::vector<torch::Device> kTwoCpus(2, torch::kCPU);

nn::Sequential four_layers() { return nn::Sequential(nn::Linear(6, 6), nn::ReLU(), nn::Linear(6, 6), nn::Tanh()); }

/// Creates its buffer in the first forward.
struct LazyImpl : nn::Module {
  torch::Tensor forward(torch::Tensor x) {
    if (!mask.defined()) mask = register_buffer("mask", torch::ones({6}));
    return x * mask * scale;
  }
  torch::Tensor mask, scale = register_parameter("scale", torch::ones({6}));
};
TORCH_MODULE(Lazy);

TEST(Profiler, IgnoresTheCallersGradModeAndAcceptsLazyLayers) {
  nn::Sequential model(nn::Linear(6, 6), Lazy(), nn::Linear(6, 6));
  model->eval();
  const torch::NoGradGuard no_grad;
  const auto of = profile(model, rows(), brief());
  EXPECT_GT(of.layers[2].backward, 0);
  EXPECT_EQ(of.layers[2].saved, 0);
  EXPECT_EQ(of.layers[1].saved, 2 * 4 * 6 * 4);
  EXPECT_FALSE(model[1]->is_training());
}

TEST(Profiler, MeasuresEachLayer) {
  auto model = models::unet(models::UNetOptions().depth(1).base_channels(4));
  auto x = torch::rand({2, 3, 16, 16});
  const auto of = profile(model, x, brief().workers(2).param_scale(4));
  ASSERT_EQ(of.layers.size(), model->size());
  EXPECT_EQ(std::tuple(of.samples, of.workers, of.device), std::tuple(2, 2, "cpu"));
  for (std::size_t i = 0; i < model->size(); ++i) {
    const auto& layer = of.layers[i];
    EXPECT_GT(std::min({layer.forward, layer.stored, layer.backward}), 0) << layer.name;
    x = model->begin()[static_cast<std::ptrdiff_t>(i)].forward(x);
    if (i + 1 < model->size()) EXPECT_EQ(layer.output, static_cast<std::int64_t>(x.nbytes())) << layer.name;
  }
  const std::int64_t image = 2 * 4 * 16 * 16 * 4;  // bytes; 4 channels
  const auto& conv = of.layers[0];
  EXPECT_EQ(conv.name, "down1_conv1");
  EXPECT_EQ(conv.parameters, 4 * 3 * 9 * 4);
  EXPECT_EQ(conv.gradients, conv.parameters);
  EXPECT_EQ(conv.optimizer, 2 * conv.parameters);
  EXPECT_EQ(conv.saved, image);  // for the batch norm that follows
  const auto& norm = of.layers[1];
  EXPECT_EQ(norm.buffers, 2 * 4 * 4 + 8);
  EXPECT_EQ(norm.saved, image + 2 * 4 * 4);  // for the in-place ReLU; and the batch's statistics
  EXPECT_FALSE(norm.changes_input);
  const auto& relu = of.layers[2];
  EXPECT_TRUE(relu.changes_input);
  EXPECT_EQ(relu.saved, 0);
  ASSERT_EQ(of.skips.size(), 1U);
  EXPECT_EQ(of.skips[0].bytes, image);
  EXPECT_EQ(of.layers[of.skips[0].from].name, "down1_stash");
  EXPECT_EQ(of.layers[of.skips[0].readers.at(0)].name, "up1_join");
}

TEST(Profiler, AcceptsTuplesUnusualSkipsAndInPlaceLayers) {
  using Pair = std::tuple<Tensor, Tensor>;
  nn::Sequential of_pairs(
      function_layer([](Pair in) { return Pair(std::get<0>(in) * 2, std::get<1>(in)); }), function_layer([](Pair in) {
        std::get<0>(in).relu_();
        return in;
      }),
      function_layer([](Pair in) { return std::get<0>(in) + std::get<1>(in).unsqueeze(1); }), nn::Linear(6, 6));
  const auto pair = Value(Pair(rows(), torch::randint(0, 5, {4})));
  EXPECT_TRUE(profile(of_pairs, pair, brief().workers(2)).layers[1].changes_input);
  nn::Sequential with_skips(nn::Linear(6, 6), Stash("a"), StashOdd(), Stash("b"), Pop("a"), PopOdd(), Pop("b"));
  EXPECT_EQ(profile(with_skips, rows(), brief().workers(3)).skips.size(), 5U);
}

TEST(LayerTimes, KeepTheirSharesOfTheTimeOfAStage) {
  Profile profile{.layers = std::vector<LayerProfile>(2)};
  const auto read = [&](const std::vector<int>& ends, const std::vector<std::pair<Action, double>>& seconds) {
    std::vector<Span> spans;
    for (const auto& [action, duration] : seconds)
      spans.push_back({.action = action, .start = 7, .end = 12 + duration, .queued = 5});
    read_times(profile, ends, spans, /*stored=*/false);
  };
  // Stage 2 has no layers, so an action takes a second besides them. The I of stage 0 computes all gradients.
  read({1, 2},
       {{{Kind::F, 0, 0}, 3}, {{Kind::F, 0, 1}, 9}, {{Kind::F, 0, 2}, 5}, {{Kind::F, 1, 0}, 9}, {{Kind::F, 2, 0}, 1}});
  read({1, 2}, {{{Kind::I, 0, 0}, 5},
                {{Kind::W, 0, 0}, 1},
                {{Kind::I, 1, 0}, 3},
                {{Kind::W, 1, 0}, 5},
                {{Kind::F, 2, 0}, 1},
                {{Kind::I, 2, 0}, 1},
                {{Kind::W, 2, 0}, 1}});
  EXPECT_DOUBLE_EQ(profile.layers[0].forward, 4) << "the median";
  EXPECT_DOUBLE_EQ(profile.layers[1].forward, 8);
  EXPECT_DOUBLE_EQ(profile.stage, 1);
  read({2}, {{{Kind::F, 0, 0}, 7},
             {{Kind::I, 0, 0}, 5},
             {{Kind::W, 0, 0}, 1},
             {{Kind::F, 1, 0}, 1},
             {{Kind::I, 1, 0}, 0},
             {{Kind::W, 1, 0}, 1}});
  EXPECT_NEAR(profile.layers[0].forward, 2, 1e-6);
  EXPECT_NEAR(profile.layers[1].forward, 4, 1e-6);
  EXPECT_NEAR(profile.layers[0].input_gradient, 2, 1e-6);
  EXPECT_NEAR(profile.layers[1].input_gradient, 1, 1e-6);
  EXPECT_NEAR(profile.layers[1].weight_gradient, 2, 1e-6) << "shared with the inputs' gradients";
}

// A cut before the second layer is refused, because it changes memory that both of its inputs use.
TEST(Profiler, KeepsLayersTogetherThatCannotBeCut) {
  using Pair = std::tuple<Tensor, Tensor>;
  nn::Sequential model(
      nn::Linear(6, 6), function_layer([](Tensor x) { return Pair(x * 2, x); }), function_layer([](Pair in) {
        return Pair(std::get<0>(in), std::get<0>(in).view({-1, 6}));
      }),
      function_layer([](Pair in) { return std::get<0>(in).mul_(2) + std::get<1>(in); }), nn::Linear(6, 6));
  const auto of = profile(model, rows(), brief().workers(2));
  EXPECT_EQ(of.layers[3].shares_with, 2);
  EXPECT_EQ(of.layers[2].forward, 0) << "layer 3 has the time of both";
}

nn::Sequential model_with_a_tie() {
  nn::Linear tied(6, 6);
  return nn::Sequential(nn::Linear(6, 6), NestedSequential(tied), nn::ReLU(), NestedSequential(tied), nn::Linear(6, 6));
}

TEST(Profiler, FindsParametersThatLayersShare) {
  const auto model = model_with_a_tie();
  for (const int workers : {1, 3}) {
    const auto of = profile(model, rows(), brief().workers(workers));
    const std::vector<TieProfile> ties = {{"1.0.weight", {1, 3}, 6 * 6 * 4}, {"1.0.bias", {1, 3}, 6 * 4}};
    EXPECT_EQ(of.ties, ties);
    EXPECT_EQ(of.layers[1].parameters, (6 * 6 + 6) * 4);
    EXPECT_EQ(of.layers[3].parameters, 0) << "counted once";
    for (int i = 0; i < 5; ++i) EXPECT_EQ(of.layers[i].shares_with, i);
  }
  EXPECT_EQ(balance_by_time(5, model, rows(), brief()), std::vector<std::int64_t>(5, 1));
}

TEST(Profiler, KeepsLayersTogetherThatShareABufferOrCannotLendAParameter) {
  auto model = model_with_a_tie();
  Profile without_loans{.layers = std::vector<LayerProfile>(5)};
  find_sharing(without_loans, Model(model).named_layers(), /*can_lend=*/false);
  EXPECT_TRUE(without_loans.ties.empty());
  EXPECT_EQ(without_loans.layers[3].shares_with, 1);
  EXPECT_EQ(without_loans.layers[4].shares_with, 4);
  const auto table = torch::ones({6});
  for (const int layer : {1, 3}) model[layer]->as<NestedSequentialImpl>()->register_buffer("table", table);
  const auto of = profile(model, rows(), brief().workers(2));
  EXPECT_EQ(of.layers[3].shares_with, 1);
  for (const int together : {1, 2}) EXPECT_EQ(of.layers[together].forward, 0) << "layer 3 has the time of its stage";
  EXPECT_GT(of.layers[3].forward, 0);
}

TEST(Profiler, AcceptsFrozenModels) {
  nn::Sequential model(nn::Linear(6, 6), nn::ReLU(), nn::Linear(6, 6));
  for (auto& parameter : model[0]->parameters()) parameter.set_requires_grad(false);
  const auto half = profile(model, rows(), brief());
  EXPECT_EQ(half.layers[0].gradients, 0);
  EXPECT_EQ(half.layers[0].backward_extra, 0);
  EXPECT_GT(half.layers[2].backward_extra, 0);
  for (auto& parameter : model->parameters()) parameter.set_requires_grad(false);
  EXPECT_EQ(profile(model, rows(), brief()).layers[2].backward_extra, 0);
}

TEST(Profiler, NamesAFailingLayer) {
  nn::Sequential model({{"first", nn::Linear(6, 6)}, {"second", nn::Linear(5, 6)}, {"third", nn::Linear(6, 6)}});
  EXPECT_THAT(error_of([&] { profile(model, rows(), brief().workers(2)); }),
              AllOf(HasSubstr("layer 'second' failed in its forward"), HasSubstr("cannot be multiplied")));
  const auto faults = std::make_shared<FaultPlan>();
  faults->arm(FaultPlan::kBackward, [] { throw std::runtime_error("tired"); });
  nn::Sequential backward({{"first", nn::Linear(6, 6)}, {"bad", Faulty(faults)}, {"third", nn::Linear(6, 6)}});
  for (const int workers : {1, 2, 3}) {
    EXPECT_THAT(error_of([&] { profile(backward, rows(), brief().workers(workers)); }),
                HasSubstr("layer 'bad' failed in its backward: tired"));
  }
  for (const auto& parameter : backward->parameters()) EXPECT_FALSE(parameter.grad().defined());
}

TEST(Profiler, RefusesInvalidArguments) {
  nn::Sequential model(nn::Linear(6, 6), nn::ReLU());
  const auto x = rows();
  EXPECT_THAT([&] { profile(nn::Sequential(), x); }, refused("no layers"));
  EXPECT_THAT([&] { profile(model, x, ProfileOptions().workers(0)); }, refused("workers must be positive"));
  EXPECT_THAT([&] { profile(model, x, ProfileOptions().param_scale(1)); },
              refused("from 2 (parameter and gradient) to 1000, but is 1"));
  EXPECT_THAT([&] { profile(model, x, ProfileOptions().param_scale(1e300)); }, refused("but is 1e+300"));
  EXPECT_THAT([&] { profile(model, torch::randn({0, 6})); }, refused("the sample is empty"));
  EXPECT_THAT([&] { profile(model, Value(std::vector<torch::Tensor>())); }, refused("the input has no tensors"));
  EXPECT_THAT([&] { balance_by_time(3, model, x); }, refused("between 1 and the number of layers, 2"));
  EXPECT_THAT([&] { balance_by_size(0, model, x); }, refused("but is 0"));
  EXPECT_THAT([&] { plan(model, x, {}); }, refused("at least one device"));
  EXPECT_THAT([&] { plan(model, x, {torch::kCPU}, {}, MeasureOptions().chunks({0})); },
              refused("chunks must be positive, but is 0"));
}

TEST(FirstMicroBatch, RequiresGradLikeTheBatch) {
  const auto x = torch::arange(10.).view({5, 2}).requires_grad_();
  const auto first = first_micro_batch(Value(std::vector<torch::Tensor>{x, torch::arange(5)}), {3, 2});
  EXPECT_TRUE(torch::equal(first.tensors()[0], x.narrow(0, 0, 3)));
  EXPECT_TRUE(first.tensors()[0].is_leaf());
  EXPECT_TRUE(first.tensors()[0].requires_grad());
  EXPECT_FALSE(first.tensors()[1].requires_grad());
}

TEST(PlanOfModel, ComparesWithTheUnpartitionedModel) {
  const auto model = four_layers();
  const auto x = rows(8);
  const RunOptions run{.chunks = 1, .checkpoint = Checkpoint::kNever};
  for (const auto& chunks : {std::vector<int>{1, 2}, std::vector<int>{2}}) {
    std::vector<double> progress;
    const auto profiling = brief().progress([&](double part) { progress.push_back(part); });
    const auto plans = plan(model, x, kTwoCpus, {}, MeasureOptions().chunks(chunks).profile(profiling));
    ASSERT_TRUE(plans.unpartitioned);
    EXPECT_EQ(plans.unpartitioned->balance, std::vector<std::int64_t>{4});
    EXPECT_EQ(plans.unpartitioned->chunks, 1);
    EXPECT_EQ(plans.unpartitioned->bytes, predict(profile(model, x, brief()), {4}, run).bytes);
    EXPECT_TRUE(std::is_sorted(progress.begin(), progress.end()));
    EXPECT_EQ(progress.back(), 1);
  }
}

TEST(PlanOfModel, LeavesOutAnUnpartitionedModelThatFails) {
  const auto refuses_more_than_4 = [](torch::Tensor x) {
    if (x.size(0) > 4) throw std::runtime_error("too many samples");
    return x * 2;
  };
  nn::Sequential model(nn::Linear(6, 6), nn::Functional(refuses_more_than_4), nn::Linear(6, 6));
  const auto plans = plan(model, rows(8), kTwoCpus, {}, MeasureOptions().chunks({4}).profile(brief()));
  EXPECT_TRUE(plans.fits());
  EXPECT_FALSE(plans.unpartitioned);
}

TEST(PlanOfModel, TriesEveryScheduleAndRunsTheBest) {
  const auto model = four_layers();
  const auto x = rows(8);
  auto plans = plan(model, x, kTwoCpus, {}, MeasureOptions().chunks({4}).pilots(100).profile(brief()));
  std::set<std::string> schedules;
  for (const auto& plan : plans.plans) {
    schedules.insert(has_lists(plan.schedule) ? "lists" : plan.schedule);
    EXPECT_EQ(plan.measured > 0, !fills_and_drains(plan.schedule));
    if (plan.measured > 0) EXPECT_GE(plan.measured, plans.best().measured);
  }
  EXPECT_EQ(schedules.size(), schedule_rules().size()) << "lists, but gpipe in loops is looped_bfs";
  const auto one = PlanOptions{.schedulings = {{"interleaved_1f1b", 1, {0, 1, 0, 1}}}};
  plans = plan(model, x, kTwoCpus, one, MeasureOptions().profile(brief()));
  EXPECT_EQ(plans.best().schedule, "interleaved_1f1b");
  EXPECT_EQ(plans.plans.size(), 1U) << "without time, one number of chunks is measured";
}

/// Recomputes all, none, and every other stage.
std::vector<Checkpoints> modes_of_segments(std::size_t stages) {
  std::vector<Checkpoints> modes = {Checkpoint::kNever, Checkpoint::kAlways};
  for (const std::size_t odd : {0, 1}) {
    std::vector<Checkpoint> alternating;
    for (std::size_t s = 0; s < stages; ++s) {
      alternating.push_back(s % 2 == odd ? Checkpoint::kAlways : Checkpoint::kNever);
    }
    modes.emplace_back(alternating);
  }
  return modes;
}

/// Compares the bytes of a profile with the counted bytes of a traced step under each schedule, in the timeline of that
/// step: they are not fewer, but for the values of losses. The profile's model ends in the loss. `segments`: the stages are
/// segments of one worker.
void expect_close_bytes(nn::Sequential model, const torch::Tensor& micro_batch,
                        const std::vector<std::int64_t>& balance, const std::vector<std::string>& schedules,
                        bool segments = false) {
  nn::Sequential whole;
  whole->extend(*model);
  whole->push_back(nn::Functional([](const torch::Tensor& output) { return output.sum().expand({output.size(0)}); }));
  const auto of_whole = profile(whole, micro_batch, brief().intraop_threads(1));
  auto with_loss = balance;
  ++with_loss.back();
  RunOptions run;
  if (segments) run.scheduling.placement.assign(balance.size(), 0);
  const auto modes =
      segments ? modes_of_segments(balance.size()) : std::vector<Checkpoints>{Checkpoint::kNever, Checkpoint::kAlways};
  run.chunks = 4;
  auto batch = torch::cat(std::vector<torch::Tensor>(run.chunks, micro_batch.detach()));
  batch.set_requires_grad(micro_batch.requires_grad());
  for (const auto& schedule : schedules) {
    for (const auto& checkpoint : modes) {
      SCOPED_TRACE(schedule + ", checkpoint " + to_string(checkpoint));
      run.checkpoint = checkpoint;
      auto options = in_chunks(run.chunks, checkpoint).schedule(schedule).intraop_threads(1);
      if (schedule.starts_with("interleaved")) options.stages_per_worker(2);
      if (segments) options.placement(run.scheduling.placement);
      GPipe pipe(model, balance, options);
      for (int i = 0; i < 2; ++i) trial_schedule(pipe, batch);
      const auto timeline = std::make_shared<Timeline>();
      pipe->trace(timeline);
      trial_schedule(pipe, batch);
      auto accounted = *timeline;
      account(accounted, StageCost(of_whole).costs(with_loss, run).bytes);
      for (std::size_t w = 0; w < timeline->peak_bytes().size(); ++w) {
        const auto counted = static_cast<double>(timeline->peak_bytes()[w]);
        const auto ratio = static_cast<double>(accounted.peak_bytes()[w]) / counted;
        EXPECT_GE(ratio, 0.9999) << "worker " << w;
        // Workers free each other's memory during their actions. The account frees it at their ends.
        if (balance.size() == 1 || segments) EXPECT_LT(ratio, segments ? 1.1 : 1.05);
      }
      for (std::size_t i = 0; i < timeline->spans.size(); ++i) {
        const auto& [span, of_profile] = std::tie(timeline->spans[i], accounted.spans[i]);
        SCOPED_TRACE(to_string(span.action));
        if (balance.size() > 1 || (span.action.kind != Kind::I && span.action.kind != Kind::W)) continue;
        const auto counted = span.bytes.after - span.bytes.before;
        EXPECT_NEAR(of_profile.bytes.after - of_profile.bytes.before, counted, 0.05 * span.bytes.peak);
      }
    }
  }
}

/// Layers that alternate.
template <class First, class Second>
nn::Sequential alternating(int pairs, First first, Second second) {
  nn::Sequential model;
  for (int i = 0; i < pairs; ++i) {
    model->push_back(first());
    model->push_back(second());
  }
  return model;
}

TEST(BytesOfSchedules, UNet) {
  const auto model = models::unet(models::UNetOptions().depth(2).base_channels(4).dropout(0.1));
  expect_close_bytes(model, torch::rand({2, 3, 32, 32}), {11, 20, 13}, {"1f1b"});
  expect_close_bytes(model, torch::rand({2, 3, 32, 32}), {11, 11, 11, 11}, {"zb_v"});
  expect_close_bytes(model, torch::rand({2, 3, 32, 32}), {44}, {"zb_h1"});
}

TEST(BytesOfSchedules, TokensThenLinearLayers) {
  nn::Sequential model(nn::Embedding(50, 128));
  model->extend(*alternating(
      6, [] { return nn::Linear(128, 128); }, [] { return nn::GELU(); }));
  const auto ids = torch::randint(0, 50, {64}, torch::kLong);
  expect_close_bytes(model, ids, {6, 7}, {"zb_h1", "zb_h2"});
  expect_close_bytes(model, ids, {3, 3, 3, 4}, {"zb_v", "v_min"});
}

// The output of a layer is saved for its own backward and for the next layer's W.
TEST(BytesOfSchedules, LayersThatEndInReLU) {
  const auto make = [] { return NestedSequential({{"linear", nn::Linear(256, 256)}, {"relu", nn::ReLU()}}); };
  const auto model = alternating(4, make, make);
  const auto x = torch::randn({64, 256});
  expect_close_bytes(model, x, {4, 4}, {"gpipe", "zb_h1", "zb_h2"});
  expect_close_bytes(model, x, {2, 2, 2, 2}, {"interleaved_zb", "zb_v"});
  expect_close_bytes(model, x, {8}, {"zb_h1"});
}

TEST(BytesOfSchedules, SegmentsOfAWorker) {
  nn::Sequential model;
  for (int i = 0; i < 8; ++i) {
    model->push_back(nn::Conv2d(nn::Conv2dOptions(8, 8, 3).padding(1)));
    model->push_back(nn::BatchNorm2d(8));
    model->push_back(nn::ReLU());
  }
  const auto x = torch::randn({4, 8, 16, 16});
  expect_close_bytes(model, x, {6, 6, 6, 6}, {"1f1b", "zb_h1"}, /*segments=*/true);
  expect_close_bytes(model, x, {4, 7, 1, 12}, {"1f1b"}, /*segments=*/true);
  const auto unet = models::unet(models::UNetOptions().depth(2).base_channels(4).dropout(0.1));
  expect_close_bytes(unet, torch::rand({2, 3, 32, 32}), {11, 11, 11, 11}, {"1f1b"}, /*segments=*/true);
}

TEST(BytesOfSchedules, AnInputThatRequiresGrad) {
  const auto model = alternating(
      4, [] { return nn::Linear(256, 256); }, [] { return nn::GELU(); });
  for (const auto& balance : {Balance{4, 4}, {8}}) {
    expect_close_bytes(model, torch::randn({16, 256}).requires_grad_(), balance, {"zb_h1"});
  }
}

TEST(Profiler, AcceptsLossesOfAnyOutput) {
  const auto complex = [](torch::Tensor x) { return torch::view_as_complex(x.view({-1, 3, 2})); };
  profile(nn::Sequential(nn::Linear(6, 6), nn::Functional(complex)), rows(), brief());
  const auto best = [](torch::Tensor x) { return x.argmax(1); };
  profile(nn::Sequential(nn::Linear(6, 6), nn::Functional(best)), rows(), brief());
}

// A part of a backward in the first stage does everything.
TEST(Profiler, DividesTheBackwardsOfLaterStages) {
  nn::Sequential model(nn::Linear(512, 512), nn::ReLU(), nn::Linear(512, 512), nn::ReLU(), nn::Linear(512, 4));
  const auto of = profile(model, torch::randn({256, 512}), brief());
  EXPECT_FALSE(of.input_requires_grad);
  const auto costs = StageCost(of).costs({2, 3}, {});
  EXPECT_EQ(costs.actions[0][static_cast<std::size_t>(Kind::I)], costs.actions[0][static_cast<std::size_t>(Kind::B)]);
  EXPECT_FALSE(costs.bytes[0].splits);
  EXPECT_TRUE(costs.bytes[1].splits);
  EXPECT_TRUE(profile(model, torch::randn({2, 512}).requires_grad_(), brief()).input_requires_grad);
}

}  // namespace
}  // namespace gpipe
