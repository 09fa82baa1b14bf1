// Compares predictions with measurements under each schedule: the time and bytes of a step. Also compares the schedules
// with each other and with the unpartitioned model on an intra-op thread per worker.

#include <torch/nn/modules/container/functional.h>
#include <torch/utils.h>

#include <CLI/CLI.hpp>
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "balance/balance.h"
#include "balance/plan.h"
#include "balance/predict.h"
#include "balance/trial.h"
#include "bench/measure.h"
#include "bench/program.h"
#include "gpipe/gpipe.h"
#include "gpipe/schedules.h"

namespace gpipe::bench {
namespace {

constexpr int kSteps = 3;
constexpr double kProfileSeconds = 2;

// The schedules to measure, with their placements.
std::vector<Scheduling> schedulings(const std::vector<std::string>& names, int workers, int layers) {
  std::vector<Scheduling> found = {{.schedule = kForward, .placement = looped_placement(workers, workers)}};
  for (auto& each : all_schedulings(workers, layers)) found.push_back(std::move(each));
  std::erase_if(found, [&](const Scheduling& each) {
    return !names.empty() && std::find(names.begin(), names.end(), each.schedule) == names.end();
  });
  return found;
}

// The model with its loss as one more layer, which cannot be cut off, so that the last stage has its cost.
Profile profile_with_loss(const Subject& it, int workers) {
  torch::nn::Sequential whole;
  whole->extend(*it.model);
  whole->push_back(torch::nn::Functional([](const torch::Tensor& output) { return output.sum().view({1}); }));
  const auto options = ProfileOptions().workers(it.input.is_cpu() ? workers : 1).seconds(kProfileSeconds);
  auto of_whole = profile(whole, it.input.narrow(0, 0, it.split_size), options);
  of_whole.layers.back().shares_with = static_cast<int>(of_whole.layers.size()) - 2;
  return of_whole;
}

// The pipeline of a plan, whose schedule can be kForward.
GPipe pipe_of(const Subject& it, const Plan& way) {
  const auto workers = static_cast<std::size_t>(*std::max_element(way.placement.begin(), way.placement.end())) + 1;
  auto options = GPipeOptions()
                     .chunks(way.chunks)
                     .checkpoint(way.checkpoint)
                     .intraop_threads(1)
                     .placement(way.placement)
                     .devices(std::vector<torch::Device>(workers, it.input.device()));
  if (way.schedule != kForward) options.schedule(way.schedule);
  return GPipe(it.model, way.balance, options);
}

// A subject under one schedule.
class Contender {
 public:
  Contender(const Subject& it, Row row, const Scheduling& scheduling, const Profile& of_whole, const Options& options)
      : row_(std::move(row)), run_{.chunks = row_.chunks, .checkpoint = row_.checkpoint, .scheduling = scheduling} {
    row_.schedule = scheduling.schedule;
    row_.stages = static_cast<int>(scheduling.placement.size());
    if (row_.schedule == kForward) run_.scheduling.schedule.clear();
    balance_ = options.balance;
    if (balance_.empty()) {
      balance_ = balance_by_time(of_whole, row_.stages, run_);
      --balance_.back();  // the loss
    }
    pipe_ = pipe_of(it, {{balance_, scheduling.placement}, row_.chunks, row_.checkpoint, row_.schedule});
    ++balance_.back();
  }

  // Measures some steps, and the bytes of one more.
  void measure(const torch::Tensor& input) {
    const auto run = [&] { step(pipe_, input, row_.schedule); };
    seconds_.push_back(median(interleave({run}, kSteps)[0]));
    traces_.push_back(std::make_shared<Timeline>());
    pipe_->trace(traces_.back());
    run();
    pipe_->trace(nullptr);
  }

  // Predicts the steps from the profiles before and after them, because the machine's speed changes with time.
  void predict(const std::vector<Profile>& profiles) {
    for (std::size_t repeat = 0; repeat < seconds_.size(); ++repeat) {
      const auto before = gpipe::predict(profiles[repeat], balance_, run_);
      const auto after = gpipe::predict(profiles[repeat + 1], balance_, run_);
      predicted_.push_back((before.seconds + after.seconds) / 2);
      const auto counted = traces_[repeat]->peak_bytes();
      const auto expected = before.timeline.peak_bytes();
      peaks_.push_back(static_cast<double>(*std::max_element(counted.begin(), counted.end())));
      for (std::size_t w = 0; w < counted.size(); ++w) {
        byte_ratios_.push_back(static_cast<double>(counted[w]) / static_cast<double>(expected[w]));
      }
    }
  }

  void print(const Contender& first) const {
    bench::print({"prediction", row_, "s", seconds_});
    bench::print({"prediction", row_, "times the predicted seconds", quotients(seconds_, predicted_)});
    bench::print({"prediction", row_, first.speed(), quotients(first.seconds_, seconds_),
                  median(quotients(first.predicted_, predicted_))});
    bench::print({"prediction", row_, "peak bytes (of the worker that has most, without parameters)", peaks_});
    bench::print({"prediction", row_, "times the predicted bytes (per worker, without parameters)", byte_ratios_});
  }

  std::string speed() const { return "times the speed of " + row_.schedule; }
  const std::vector<double>& seconds() const { return seconds_; }

 private:
  Row row_;
  RunOptions run_;
  std::vector<std::int64_t> balance_;  // with the loss
  GPipe pipe_{nullptr};
  std::vector<std::shared_ptr<Timeline>> traces_;  // one per repeat, as in all lists below
  std::vector<double> seconds_;
  std::vector<double> predicted_;
  std::vector<double> peaks_;
  std::vector<double> byte_ratios_;  // one per repeat and worker
};

// A step of the whole mini-batch without a pipeline and without checkpointing.
void step_on_threads(Subject& it, int threads) {
  torch::set_num_threads(threads);
  step(it.model, it.input);
  torch::set_num_threads(1);
}

// Measures all schedules and the unpartitioned model in turn. Row::stages is the number of workers.
void measure(const Row& row, const Options& options) {
  auto it = subject(row.model, row.chunks, torch::Device(options.device));
  std::vector<Profile> profiles = {profile_with_loss(it, row.stages)};
  std::vector<Contender> contenders;
  for (const auto& scheduling : schedulings(options.schedules, row.stages, static_cast<int>(it.model->size()))) {
    contenders.emplace_back(it, row, scheduling, profiles.front(), options);
  }
  std::vector<double> on_threads;
  for (int repeat = 0; repeat < options.repeats; ++repeat) {
    for (auto& each : contenders) each.measure(it.input);
    on_threads.push_back(median(interleave({[&] { step_on_threads(it, row.stages); }}, kSteps)[0]));
    profiles.push_back(profile_with_loss(it, row.stages));
  }
  for (auto& each : contenders) each.predict(profiles);
  const auto& first = contenders.at(0);
  for (const auto& each : contenders) each.print(first);
  print({"prediction", row,
         absl::StrCat(first.speed(), ", of the unpartitioned model on an intra-op thread per worker"),
         quotients(first.seconds(), on_threads)});
}

}  // namespace
}  // namespace gpipe::bench

int main(int argc, char** argv) {
  using namespace gpipe::bench;
  CLI::App app("Measured time and bytes of a step under each schedule, relative to the predictions.");
  Options options{.models = {"mlp", "unet", "resnet18", "resnet50", "encoder"},
                  .chunks = {2, 4, 8},
                  .schedules = {},  // all
                  .repeats = 5};
  add_flags(app, options);
  return run_program(app, argc, argv, [&] { for_each_row(options, [&](const Row& row) { measure(row, options); }); });
}
