// Profiles, suggestions and predictions of real models. Compares bytes, never times.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <mutex>
#include <set>

#include "balance/balance.h"
#include "balance/measurement.h"
#include "balance/predict.h"
#include "balance/suggest.h"
#include "balance/trial.h"
#include "gpipe/nested.h"
#include "gpipe/schedules.h"
#include "models/resnet.h"
#include "models/unet.h"
#include "tests/gpipe/instruments.h"
#include "tests/gpipe/layers.h"
#include "tests/support/support.h"

namespace gpipe {
namespace {

using ::testing::AllOf;
using ::testing::Gt;
using ::testing::HasSubstr;
namespace nn = torch::nn;

ProfileOptions brief() { return ProfileOptions().seconds(0).repeats(1); }

TEST(Profiler, RestoresTheModel) {
  auto model = models::unet(models::UNetOptions().depth(2).base_channels(4).dropout(0.1));
  model->eval();
  model[3]->train();
  const auto x = torch::rand({4, 3, 16, 16});
  const auto state = at::detail::getDefaultCPUGenerator().get_state();
  std::vector<torch::Tensor> before;
  for (const auto& tensor : model->parameters()) before.push_back(tensor.clone());
  for (const auto& tensor : model->buffers()) before.push_back(tensor.clone());
  int hooks = 0;
  for (auto& parameter : model->parameters()) parameter.register_hook([&](torch::Tensor) { ++hooks; });
  model->parameters()[0].mutable_grad() = torch::ones_like(model->parameters()[0]);

  const auto profiled = profile(model, x.narrow(0, 0, 2), brief().workers(2));
  const auto suggestion = suggest(model, x, {torch::kCPU, torch::kCPU}, SuggestOptions().chunks({2}).profile(brief()));
  refine(model, x, {torch::kCPU, torch::kCPU}, suggestion, 2, 1);

  auto was = before.begin();
  for (const auto& tensor : model->parameters()) EXPECT_TRUE(torch::equal(tensor, *was++));
  for (const auto& tensor : model->buffers()) EXPECT_TRUE(torch::equal(tensor, *was++));
  EXPECT_TRUE(torch::equal(model->parameters()[0].grad(), torch::ones_like(model->parameters()[0])));
  for (std::size_t i = 1; i < model->parameters().size(); ++i) EXPECT_FALSE(model->parameters()[i].grad().defined());
  for (std::size_t i = 0; i < model->size(); ++i) EXPECT_EQ(model[i]->is_training(), i == 3);
  EXPECT_TRUE(torch::equal(at::detail::getDefaultCPUGenerator().get_state(), state));
  EXPECT_EQ(hooks, 0);
}

/// Creates its buffer in the first forward.
struct LazyImpl : nn::Module {
  torch::Tensor forward(torch::Tensor x) {
    if (!mask.defined()) mask = register_buffer("mask", torch::ones({6}));
    return x * mask;
  }
  torch::Tensor mask;
};
TORCH_MODULE(Lazy);

TEST(Profiler, IgnoresTheCallersGradModeAndAcceptsLazyLayers) {
  nn::Sequential model(nn::Linear(6, 6), Lazy(), nn::Linear(6, 6));
  model->eval();
  const torch::NoGradGuard no_grad;
  const auto of = profile(model, torch::randn({4, 6}), brief());
  EXPECT_GT(of.layers[2].backward, 0);
  EXPECT_EQ(of.layers[2].saved, 0);
  EXPECT_EQ(of.layers[1].saved, 4 * 6 * 4);
  EXPECT_FALSE(model[1]->is_training());
}

TEST(Profiler, MeasuresEachLayer) {
  auto model = models::unet(models::UNetOptions().depth(1).base_channels(4));
  std::vector<double> progress;
  const auto of = profile(model, torch::rand({2, 3, 16, 16}),
                          brief().workers(2).param_scale(4).progress([&](double part) { progress.push_back(part); }));
  ASSERT_EQ(of.layers.size(), model->size());
  EXPECT_EQ(of.samples, 2);
  EXPECT_EQ(of.workers, 2);
  EXPECT_EQ(of.device, "cpu");
  for (const auto& layer : of.layers) {
    EXPECT_THAT(layer.forward, Gt(0)) << layer.name;
    EXPECT_THAT(layer.stored, Gt(0)) << layer.name;
    EXPECT_THAT(layer.recompute, Gt(0)) << layer.name;
    EXPECT_THAT(layer.backward, Gt(0)) << layer.name;
  }
  const std::int64_t image = 2 * 4 * 16 * 16 * 4;  // bytes; 4 channels
  const auto& conv = of.layers[0];
  EXPECT_EQ(conv.name, "down1_conv1");
  EXPECT_EQ(conv.parameters, 4 * 3 * 9 * 4);
  EXPECT_EQ(conv.gradients, conv.parameters);
  EXPECT_EQ(conv.optimizer, 2 * conv.parameters);
  EXPECT_EQ(conv.output, image);
  EXPECT_EQ(conv.saved, image);  // for the batch norm that follows
  const auto& norm = of.layers[1];
  EXPECT_EQ(norm.buffers, 2 * 4 * 4 + 8);
  EXPECT_EQ(norm.saved, image + 2 * 4 * 4);  // for the in-place ReLU; and the batch's statistics
  const auto& relu = of.layers[2];
  EXPECT_TRUE(relu.changes_input);
  EXPECT_EQ(relu.saved, 0);
  EXPECT_FALSE(norm.changes_input);
  ASSERT_EQ(of.skips.size(), 1U);
  EXPECT_EQ(of.skips[0].bytes, image);
  EXPECT_EQ(of.layers[of.skips[0].from].name, "down1_stash");
  EXPECT_EQ(of.layers[of.skips[0].to].name, "up1_join");
  EXPECT_TRUE(std::is_sorted(progress.begin(), progress.end()));
  EXPECT_EQ(progress.back(), 1);
}

TEST(Cut, SendsFewerBytesAtLowBandwidth) {
  auto model = models::unet(models::UNetOptions().depth(2).base_channels(4));
  auto of = profile(model, torch::rand({2, 3, 32, 32}), brief());
  for (auto& layer : of.layers) layer.forward = layer.stored = layer.recompute = layer.backward = 1;
  const auto moved = [&](const std::vector<std::int64_t>& balance) {
    return StageCost(of).bytes_in(static_cast<int>(balance[0]), static_cast<int>(of.layers.size()));
  };
  const auto by_time = balance_by_time(of, 2, {.chunks = 4});
  const auto by_time_and_transfer = balance_by_time(of, 2, {.chunks = 4, .network = {.inside = {.bandwidth = 4000}}});
  EXPECT_LT(moved(by_time_and_transfer), moved(by_time));
}

TEST(Profiler, AcceptsTuplesUnusualSkipsAndInPlaceLayers) {
  const auto tuple = Value(std::make_tuple(torch::randn({4, 6}), torch::randint(0, 5, {4})));
  const auto of_tuples = profile(tuple_model(), tuple, brief().workers(2));
  EXPECT_TRUE(of_tuples.layers[1].changes_input);
  const auto of_skips = profile(skip_model(), torch::randn({4, 6}), brief().workers(3));
  EXPECT_EQ(of_skips.skips.size(), 5U);
}

nn::Sequential model_with_a_tie() {
  nn::Linear tied(6, 6);
  return nn::Sequential(nn::Linear(6, 6), NestedSequential(tied), nn::ReLU(), NestedSequential(tied), nn::Linear(6, 6));
}

TEST(Profiler, FindsParametersThatLayersShare) {
  const auto model = model_with_a_tie();
  for (const int workers : {1, 3}) {
    const auto of = profile(model, torch::randn({4, 6}), brief().workers(workers));
    const std::vector<TieProfile> ties = {{"1.0.weight", {1, 3}, 6 * 6 * 4}, {"1.0.bias", {1, 3}, 6 * 4}};
    EXPECT_EQ(of.ties, ties);
    EXPECT_EQ(of.layers[1].parameters, (6 * 6 + 6) * 4);
    EXPECT_EQ(of.layers[3].parameters, 0) << "counted once";
    for (int i = 0; i < 5; ++i) EXPECT_EQ(of.layers[i].shares_with, i);
  }
  EXPECT_EQ(balance_by_time(5, model, torch::randn({4, 6}), brief()), std::vector<std::int64_t>(5, 1));
}

TEST(Profiler, KeepsLayersTogetherThatShareABuffer) {
  auto model = model_with_a_tie();
  const auto table = torch::ones({6});
  for (const int layer : {1, 3}) model[layer]->as<NestedSequentialImpl>()->register_buffer("table", table);
  EXPECT_EQ(profile(model, torch::randn({4, 6}), brief()).layers[3].shares_with, 1);
}

TEST(Profiler, KeepsTiedLayersTogetherWhereParametersCannotBeLent) {
  const auto model = model_with_a_tie();
  Profile of{.layers = std::vector<LayerProfile>(5)};
  find_sharing(of, Model(model).named_layers(), /*can_lend=*/false);
  EXPECT_TRUE(of.ties.empty());
  EXPECT_EQ(of.layers[3].shares_with, 1);
  EXPECT_EQ(of.layers[4].shares_with, 4);
}

TEST(Profiler, AcceptsFrozenModels) {
  nn::Sequential model(nn::Linear(6, 6), nn::ReLU(), nn::Linear(6, 6));
  for (auto& parameter : model[0]->parameters()) parameter.set_requires_grad(false);
  const auto half = profile(model, torch::randn({4, 6}), brief());
  EXPECT_EQ(half.layers[0].gradients, 0);
  EXPECT_EQ(half.layers[0].backward, 0);
  EXPECT_GT(half.layers[2].backward, 0);
  for (auto& parameter : model->parameters()) parameter.set_requires_grad(false);
  EXPECT_EQ(profile(model, torch::randn({4, 6}), brief()).layers[2].backward, 0);
}

struct ThrowsBackwardImpl : nn::Module {
  torch::Tensor forward(torch::Tensor x) {
    return on_backward(x, [] { throw std::runtime_error("tired"); });
  }
};
TORCH_MODULE(ThrowsBackward);

TEST(Profiler, NamesAFailingLayer) {
  nn::Sequential model({{"first", nn::Linear(6, 6)}, {"second", nn::Linear(5, 6)}, {"third", nn::Linear(6, 6)}});
  EXPECT_THAT(error_of([&] {
                profile(model, torch::randn({4, 6}), brief().workers(2));
              }),
              AllOf(HasSubstr("layer 'second' failed in its forward"), HasSubstr("cannot be multiplied")));
  nn::Sequential backward({{"first", nn::Linear(6, 6)}, {"bad", ThrowsBackward()}, {"third", nn::Linear(6, 6)}});
  for (const int workers : {1, 2, 3}) {
    EXPECT_THAT(error_of([&] {
                  profile(backward, torch::randn({4, 6}), brief().workers(workers));
                }),
                HasSubstr("layer 'bad' failed in its backward: tired"));
  }
  for (const auto& parameter : backward->parameters()) EXPECT_FALSE(parameter.grad().defined());
}

TEST(Profiler, RefusesInvalidArguments) {
  nn::Sequential model(nn::Linear(6, 6), nn::ReLU());
  const auto x = torch::randn({4, 6});
  const auto refusal = [](auto call) { return error_of<std::invalid_argument>(call); };
  EXPECT_THAT(refusal([&] { profile(nn::Sequential(), x); }), HasSubstr("no layers"));
  EXPECT_THAT(refusal([&] { profile(model, x, ProfileOptions().workers(0)); }), HasSubstr("workers must be positive"));
  EXPECT_THAT(refusal([&] { profile(model, x, ProfileOptions().param_scale(1)); }),
              HasSubstr("from 2 (parameter and gradient) to 1000, but is 1"));
  EXPECT_THAT(refusal([&] { profile(model, x, ProfileOptions().param_scale(1e300)); }), HasSubstr("but is 1e+300"));
  EXPECT_THAT(refusal([&] { profile(model, torch::randn({0, 6})); }), HasSubstr("the sample is empty"));
  EXPECT_THAT(refusal([&] { profile(model, Value(std::vector<torch::Tensor>())); }),
              HasSubstr("the input has no tensors"));
  EXPECT_THAT(refusal([&] { balance_by_time(3, model, x); }), HasSubstr("between 1 and the number of layers, 2"));
  EXPECT_THAT(refusal([&] { balance_by_size(0, model, x); }), HasSubstr("but is 0"));
  EXPECT_THAT(refusal([&] { suggest(model, x, {torch::kCPU}, SuggestOptions().checkpoints({})); }),
              HasSubstr("at least one checkpoint mode"));
  EXPECT_THAT(refusal([&] { suggest(model, x, {}); }), HasSubstr("at least one device"));
  EXPECT_THAT(refusal([&] { suggest(model, x, {torch::kCPU}, SuggestOptions().chunks({0})); }),
              HasSubstr("but one is 0"));
}

/// A layer on a simulated device whose memory holds the graphs of four such layers.
struct LargeImpl : nn::Module {
  explicit LargeImpl(std::shared_ptr<Live> live) : linear(register_module("linear", nn::Linear(6, 6))) {
    peak->live = std::move(live);
  }
  torch::Tensor forward(torch::Tensor x) {
    static std::mutex mutex;
    const std::lock_guard<std::mutex> lock(mutex);
    if (peak->live->now >= 4) TORCH_CHECK_WITH(OutOfMemoryError, false, "no memory");
    return peak(linear(x));
  }
  nn::Linear linear;
  Peak peak;
};
TORCH_MODULE(Large);

nn::Sequential large_model(const std::shared_ptr<Live>& live) {
  nn::Sequential model;
  model->push_back(Large(live));
  model->push_back(Stash("a"));
  for (int i = 0; i < 3; ++i) model->push_back(Large(live));
  model->push_back(StashOdd());
  model->push_back(Pop("a"));
  model->push_back(PopOdd());
  model->push_back(nn::Dropout());
  return model;
}

TEST(Profiler, ProfilesLayerByLayerIfTheModelIsTooLarge) {
  const auto live = std::make_shared<Live>();
  auto model = large_model(live);
  model->eval();
  const auto x = torch::randn({4, 6});
  const auto before = x.clone();
  const auto of = profile(model, x, brief().workers(2));
  EXPECT_TRUE(torch::equal(x, before));
  EXPECT_EQ(of.workers, 1);
  for (const auto& layer : *model) EXPECT_FALSE(layer.ptr()->is_training());
  EXPECT_GT(of.layers[8].backward, 0);
  EXPECT_GT(of.layers[8].saved, 0);
  ASSERT_EQ(of.layers.size(), model->size());
  for (const auto& layer : of.layers) EXPECT_GT(layer.forward, 0);
  ASSERT_EQ(of.skips.size(), 4U);
  EXPECT_EQ(of.skips[0].bytes, 4 * 6 * 4);
  EXPECT_EQ(of.layers[0].output, 4 * 6 * 4);
  EXPECT_GT(of.layers[2].backward, 0);
  // At least the bytes of a profile of the whole model.
  const auto unlimited = std::make_shared<Live>();
  unlimited->now = -1000;
  const auto same = large_model(unlimited);
  const auto whole = profile(same, torch::randn({4, 6}), brief().workers(2));
  const StageCost of_lone(of);
  const StageCost of_whole(whole);
  for (const auto checkpoint : {Checkpoint::kNever, Checkpoint::kAlways}) {
    for (const auto& [first, end] : {std::pair(0, 4), std::pair(4, 8), std::pair(0, 8)}) {
      const RunOptions run{.chunks = 4, .checkpoint = checkpoint};
      const auto ratio =
          static_cast<double>(of_lone.bytes(first, end, run)) / static_cast<double>(of_whole.bytes(first, end, run));
      EXPECT_GT(ratio, 0.95);
      EXPECT_LT(ratio, 2);
    }
  }
}

TEST(Profiler, NamesALayerThatIsTooLarge) {
  const auto live = std::make_shared<Live>();
  live->now = 4;
  nn::Sequential model(nn::Linear(6, 6), Large(live));
  EXPECT_THAT(error_of([&] {
                profile(model, torch::randn({4, 6}), brief());
              }),
              HasSubstr("layer '1' alone does not fit its device for 4 samples"));
}

/// Runs out of memory once, in the first measured run.
struct OnceImpl : nn::Module {
  torch::Tensor forward(torch::Tensor x) {
    if (++calls == 7) TORCH_CHECK_WITH(OutOfMemoryError, false, "no memory");
    return x * 2;
  }
  int calls = 0;
};
TORCH_MODULE(Once);

TEST(Profiler, ProgressNeverFallsBack) {
  Once once;
  nn::Sequential model(nn::Linear(6, 6), once);
  std::vector<double> progress;
  const auto options = ProfileOptions().repeats(1).progress([&](double part) { progress.push_back(part); });
  profile(model, torch::randn({4, 6}), options);
  EXPECT_GT(once->calls, 7);
  EXPECT_LT(progress.front(), 0.5);
  EXPECT_EQ(progress.back(), 1);
  EXPECT_TRUE(std::is_sorted(progress.begin(), progress.end()));
}

TEST(FirstMicroBatch, RequiresGradLikeTheBatch) {
  const auto x = torch::arange(10.).view({5, 2}).requires_grad_();
  const auto first = first_micro_batch(Value(std::vector<torch::Tensor>{x, torch::arange(5)}), {3, 2});
  EXPECT_TRUE(torch::equal(first.tensors()[0], x.narrow(0, 0, 3)));
  EXPECT_TRUE(first.tensors()[0].is_leaf());
  EXPECT_TRUE(first.tensors()[0].requires_grad());
  EXPECT_FALSE(first.tensors()[1].requires_grad());
}

/// Fails for more than `most` samples.
struct RefusesMoreThanImpl : nn::Module {
  explicit RefusesMoreThanImpl(std::int64_t most) : most(most) {}
  torch::Tensor forward(const torch::Tensor& x) {
    if (x.size(0) > most) throw std::runtime_error("too many samples");
    return x * 2;
  }
  const std::int64_t most;
};
TORCH_MODULE(RefusesMoreThan);

TEST(Suggest, ComparesWithTheUnpartitionedModel) {
  nn::Sequential model(nn::Linear(6, 6), nn::ReLU(), nn::Linear(6, 6));
  const auto x = torch::randn({8, 6});
  for (const auto& chunks : {std::vector<int>{1, 2}, std::vector<int>{2}}) {
    for (const auto& devices : {std::vector<torch::Device>{torch::kCPU}, {torch::kCPU, torch::kCPU}}) {
      std::vector<double> progress;
      const auto profiling = brief().progress([&](double part) { progress.push_back(part); });
      const auto suggestion = suggest(model, x, devices, SuggestOptions().chunks(chunks).profile(profiling));
      EXPECT_EQ(suggestion.profiles.size(), chunks.size());
      ASSERT_TRUE(suggestion.unpartitioned);
      EXPECT_EQ(suggestion.unpartitioned->balance, std::vector<std::int64_t>{3});
      EXPECT_EQ(suggestion.unpartitioned->chunks, 1);
      EXPECT_EQ(suggestion.unpartitioned->checkpoint, Checkpoint::kNever);
      EXPECT_EQ(suggestion.unpartitioned->bytes.size(), 1U);
      EXPECT_GT(suggestion.unpartitioned->seconds, 0);
      EXPECT_TRUE(std::is_sorted(progress.begin(), progress.end()));
      EXPECT_EQ(progress.back(), 1);
    }
  }
}

TEST(Suggest, LeavesOutAnUnpartitionedModelThatFails) {
  nn::Sequential model(nn::Linear(6, 6), RefusesMoreThan(4), nn::Linear(6, 6));
  const auto suggestion =
      suggest(model, torch::randn({8, 6}), {torch::kCPU, torch::kCPU}, SuggestOptions().chunks({4}).profile(brief()));
  EXPECT_TRUE(suggestion.fits());
  EXPECT_FALSE(suggestion.unpartitioned);
}

TEST(Suggest, TriesEverySchedule) {
  nn::Sequential model(nn::Linear(6, 6), nn::ReLU(), nn::Linear(6, 6), nn::Tanh());
  const auto x = torch::randn({8, 6});
  const std::vector<torch::Device> devices = {torch::kCPU, torch::kCPU};
  auto suggestion = suggest(model, x, devices, SuggestOptions().chunks({4}).profile(brief()));
  std::set<std::string> schedules;
  for (const auto& candidate : suggestion.candidates) schedules.insert(candidate.schedule);
  EXPECT_EQ(schedules.size(), schedule_rules().size() - 1) << "gpipe in loops is looped_bfs";
  EXPECT_EQ(refine(model, x, devices, suggestion, /*candidates=*/100, /*repeats=*/1).size(),
            suggestion.candidates.size());
  suggestion = suggest(model, x, devices,
                       SuggestOptions().chunks({4}).scheduling({kAnySchedule, 1, v_placement(4)}).profile(brief()));
  for (const auto& candidate : suggestion.candidates) EXPECT_EQ(candidate.placement, v_placement(4));
  EXPECT_THAT(error_of<std::invalid_argument>([&] {
                suggest(model, x, devices, SuggestOptions().scheduling({kAnySchedule, 3}));
              }),
              HasSubstr("no schedule fits 2 devices, 4 layers"));
}

TEST(Suggest, RefinesWithTheSchedule) {
  nn::Sequential model(nn::Linear(6, 6), nn::ReLU(), nn::Linear(6, 6), nn::Tanh());
  const auto x = torch::randn({8, 6});
  const std::vector<torch::Device> devices = {torch::kCPU, torch::kCPU};
  for (const auto& scheduling : {Scheduling{"1f1b"}, Scheduling{"interleaved_1f1b", 2}}) {
    const auto suggestion =
        suggest(model, x, devices, SuggestOptions().chunks({4}).scheduling(scheduling).profile(brief()));
    EXPECT_EQ(suggestion.best().schedule, scheduling.schedule);
    const auto measured = refine(model, x, devices, suggestion, /*candidates=*/1, /*repeats=*/1);
    EXPECT_GT(measured.front().seconds, 0);
    for (const auto& parameter : model->parameters()) EXPECT_FALSE(parameter.grad().defined());
  }
  EXPECT_THAT(error_of<std::invalid_argument>([&] {
                suggest(model, x, devices, SuggestOptions().scheduling({"gpipe", 0}));
              }),
              HasSubstr("stages_per_worker must be positive, but is 0"));
}

TEST(Suggest, StopsWhenItsProgressFunctionThrows) {
  nn::Sequential model(nn::Linear(6, 6), nn::ReLU(), nn::Linear(6, 6));
  const auto x = torch::randn({8, 6});
  for (const double last : {0.0, 0.3, 0.9}) {  // in the first profile, in a later one, in the unpartitioned model's
    const auto profiling = brief().progress([&](double part) {
      if (part >= last) throw std::runtime_error("enough");
    });
    EXPECT_EQ(error_of([&] {
                suggest(model, x, {torch::kCPU, torch::kCPU}, SuggestOptions().profile(profiling));
              }),
              "enough");
  }
}

class BytesOfSchedules : public testing::Test {
 protected:
  /// Compares the bytes of a profile with the counted bytes of a traced step under each schedule, in the timeline of that
  /// step: they are at least `least` of these. The profile's model ends in the loss.
  static void expect_close(nn::Sequential model, const torch::Tensor& micro_batch,
                           const std::vector<std::int64_t>& balance, const std::vector<std::string>& schedules,
                           double least = 0.93) {
    nn::Sequential whole;
    whole->extend(*model);
    whole->push_back(nn::Functional([](const torch::Tensor& output) { return output.sum().view({1}); }));
    const auto of_whole = profile(whole, micro_batch, brief().intraop_threads(1));
    auto with_loss = balance;
    ++with_loss.back();
    const auto bytes = StageCost(of_whole).costs(with_loss, {}).bytes;
    const int chunks = 4;
    auto batch = torch::cat(std::vector<torch::Tensor>(chunks, micro_batch.detach()));
    batch.set_requires_grad(micro_batch.requires_grad());
    for (const auto& schedule : schedules) {
      for (const auto checkpoint : {Checkpoint::kNever, Checkpoint::kAlways}) {
        SCOPED_TRACE(schedule + ", checkpoint " + to_string(checkpoint));
        auto options = GPipeOptions().chunks(chunks).checkpoint(checkpoint).schedule(schedule).intraop_threads(1);
        if (schedule.starts_with("interleaved")) options.stages_per_worker(2);
        GPipe pipe(model, balance, options);
        for (int i = 0; i < 2; ++i) trial_schedule(pipe, batch);
        const auto timeline = std::make_shared<Timeline>();
        pipe->trace(timeline);
        trial_schedule(pipe, batch);
        auto accounted = *timeline;
        account(accounted, bytes);
        for (std::size_t w = 0; w < timeline->peak_bytes().size(); ++w) {
          const auto counted = static_cast<double>(timeline->peak_bytes()[w]);
          const auto ratio = static_cast<double>(accounted.peak_bytes()[w]) / counted;
          EXPECT_GT(ratio, least) << "worker " << w;
          // Workers free each other's memory during their actions. The account frees it at their ends.
          if (balance.size() == 1) EXPECT_LT(ratio, 1.05);
        }
        for (std::size_t i = 0; i < timeline->spans.size(); ++i) {
          const auto& span = timeline->spans[i];
          if (span.action.kind != Kind::I && span.action.kind != Kind::W) continue;
          // What the action itself allocates and frees. Another worker may free memory of this one meanwhile.
          const auto counted = span.bytes.after - span.bytes.before;
          const auto expected = accounted.spans[i].bytes.after - accounted.spans[i].bytes.before;
          if (balance.size() == 1) EXPECT_NEAR(expected, counted, 0.05 * span.bytes.peak) << to_string(span.action);
        }
      }
    }
  }
};

TEST_F(BytesOfSchedules, UNet) {
  const auto model = models::unet(models::UNetOptions().depth(2).base_channels(8).dropout(0.1));
  expect_close(model, torch::rand({2, 3, 32, 32}), {11, 20, 13}, {"gpipe", "1f1b"});
  expect_close(model, torch::rand({2, 3, 32, 32}), {11, 11, 11, 11}, {"zb_v", "dualpipe_v"});
  expect_close(model, torch::rand({2, 3, 32, 32}), {44}, {"gpipe", "zb_h1"});
}

TEST_F(BytesOfSchedules, ResNet) {
  expect_close(models::resnet18(models::ResNetOptions().num_classes(10)), torch::rand({2, 3, 32, 32}), {46, 25},
               {"zb_h2"});
}

TEST_F(BytesOfSchedules, TokensThenLinearLayers) {
  nn::Sequential model(nn::Embedding(50, 128));
  for (int i = 0; i < 6; ++i) {
    model->push_back(nn::Linear(128, 128));
    model->push_back(nn::GELU());
  }
  const auto ids = torch::randint(0, 50, {64}, torch::kLong);
  expect_close(model, ids, {6, 7}, {"zb_h1", "zb_h2"});
  expect_close(model, ids, {3, 3, 3, 4}, {"zb_v", "v_min"});
}

// The output of a layer is saved for its own backward and for the next layer's W.
TEST_F(BytesOfSchedules, LayersThatEndInReLU) {
  nn::Sequential model;
  for (int i = 0; i < 8; ++i) {
    model->push_back(NestedSequential({{"linear", nn::Linear(256, 256)}, {"relu", nn::ReLU()}}));
  }
  const auto x = torch::randn({64, 256});
  expect_close(model, x, {4, 4}, {"gpipe", "zb_h1", "greedy"}, 0.97);
  expect_close(model, x, {2, 2, 2, 2}, {"interleaved_zb", "zb_v"}, 0.97);
  expect_close(model, x, {8}, {"zb_h1"});
}

TEST_F(BytesOfSchedules, AnInputThatRequiresGrad) {
  nn::Sequential model;
  for (int i = 0; i < 4; ++i) {
    model->push_back(nn::Linear(256, 256));
    model->push_back(nn::GELU());
  }
  expect_close(model, torch::randn({16, 256}).requires_grad_(), {4, 4}, {"zb_h1"});
  expect_close(model, torch::randn({16, 256}).requires_grad_(), {8}, {"zb_h1"});
}

TEST(Profiler, AcceptsLossesOfAnyOutput) {
  const auto complex = [](torch::Tensor x) { return torch::view_as_complex(x.view({-1, 3, 2})); };
  profile(nn::Sequential(nn::Linear(6, 6), nn::Functional(complex)), torch::randn({4, 6}), brief());
  const auto best = [](torch::Tensor x) { return x.argmax(1); };
  profile(nn::Sequential(nn::Linear(6, 6), nn::Functional(best)), torch::randn({4, 6}), brief());
}

// W's of layers before the first parameters, and of layers without large ones, take no time.
TEST(Profiler, MeasuresBothPartsOfABackward) {
  nn::Sequential model(nn::Linear(512, 512), nn::ReLU(), nn::Linear(512, 512), nn::ReLU(), nn::Linear(512, 4));
  const auto of = profile(model, torch::randn({256, 512}), ProfileOptions().repeats(5).seconds(10));
  EXPECT_FALSE(of.input_requires_grad);
  EXPECT_GT(of.layers[2].input_gradient, 0);
  EXPECT_GT(of.layers[2].weight_gradient, 0);
  EXPECT_EQ(profile(model, torch::randn({2, 512}).requires_grad_(), brief()).input_requires_grad, true);
  // A part of a backward in the first stage does everything.
  const auto costs = StageCost(of).costs({2, 3}, {});
  EXPECT_EQ(costs.actions[0][static_cast<std::size_t>(Kind::I)], costs.actions[0][static_cast<std::size_t>(Kind::B)]);
  EXPECT_FALSE(costs.bytes[0].splits);
  EXPECT_TRUE(costs.bytes[1].splits);
}

}  // namespace
}  // namespace gpipe
