// Compares predictions with measurements under each schedule: the time and bytes of a step.

#include <torch/nn/modules/container/functional.h>
#include <torch/utils.h>

#include <CLI/CLI.hpp>
#include <algorithm>

#include "balance/balance.h"
#include "balance/plan.h"
#include "balance/predict.h"
#include "bench/measure.h"
#include "gpipe/base/clock.h"

namespace gpipe::bench {
namespace {

constexpr int kSteps = 3;
constexpr double kProfileSeconds = 2;

// The model with its loss as one more layer, which cannot be cut off, so that the last stage has its cost.
Profile profile_with_loss(const Subject& it, int workers) {
  torch::nn::Sequential whole;
  whole->extend(*it.model);
  whole->push_back(torch::nn::Functional([](const torch::Tensor& output) { return output.flatten(1).sum(1); }));
  const auto options = ProfileOptions().workers(it.input.is_cpu() ? workers : 1).seconds(kProfileSeconds);
  auto of_whole = profile(whole, it.input.narrow(0, 0, it.split_size), options);
  of_whole.layers.back().shares_with = static_cast<int>(of_whole.layers.size()) - 2;
  return of_whole;
}

// A subject under one schedule.
class Contender {
 public:
  Contender(const Subject& it, Row row, const Scheduling& scheduling, const Profile& of_whole, const Options& options)
      : row_(std::move(row)), run_{.chunks = row_.chunks, .checkpoint = row_.checkpoint, .scheduling = scheduling} {
    const auto workers = static_cast<std::size_t>(row_.stages);
    row_.schedule = scheduling.schedule;
    row_.stages = static_cast<int>(scheduling.placement.size());
    balance_ = options.balance;
    if (balance_.empty()) {
      balance_ = balance_by_time(of_whole, row_.stages, run_);
      --balance_.back();  // the loss
    }
    pipe_ = GPipe(it.model, balance_,
                  GPipeOptions()
                      .chunks(row_.chunks)
                      .checkpoint(row_.checkpoint)
                      .intraop_threads(1)
                      .placement(scheduling.placement)
                      .schedule(scheduling.schedule)
                      .devices(std::vector<torch::Device>(workers, it.input.device())));
    ++balance_.back();
  }

  // Measures some steps, and the bytes of one more.
  void measure(const torch::Tensor& input) {
    const auto run = [&] { step(pipe_, input); };
    seconds_.push_back(median(interleave({run}, kSteps)[0]));
    traces_.push_back(std::make_shared<Timeline>());
    pipe_->trace(traces_.back());
    run();
    pipe_->trace(nullptr);
  }

  // Predicts the steps from the profiles before and after them, because the machine's speed changes with time.
  void print(const std::vector<Profile>& profiles) const {
    std::vector<double> ratios, peaks, byte_ratios;  // the last one also per worker
    for (std::size_t repeat = 0; repeat < seconds_.size(); ++repeat) {
      const auto before = predict(profiles[repeat], balance_, run_);
      const auto after = predict(profiles[repeat + 1], balance_, run_);
      ratios.push_back(seconds_[repeat] / ((before.seconds + after.seconds) / 2));
      const auto counted = traces_[repeat]->peak_bytes();
      const auto expected = before.timeline.peak_bytes();
      peaks.push_back(static_cast<double>(*std::max_element(counted.begin(), counted.end())));
      for (std::size_t w = 0; w < counted.size(); ++w) {
        byte_ratios.push_back(static_cast<double>(counted[w]) / static_cast<double>(expected[w]));
      }
    }
    bench::print("prediction", row_,
                 {{"seconds", seconds_},
                  {"of_predicted_seconds", ratios},
                  {"peak_bytes", peaks},  // of the worker that has most, without parameters
                  {"of_predicted_bytes", byte_ratios}});
  }

 private:
  Row row_;
  RunOptions run_;
  std::vector<std::int64_t> balance_;  // with the loss
  GPipe pipe_{nullptr};
  std::vector<std::shared_ptr<Timeline>> traces_;  // one per repeat, as the seconds
  std::vector<double> seconds_;
};

// Measures all schedules in turn. Row::stages is the number of workers.
void measure(const Row& row, const Options& options) {
  const auto it = subject(row.model, row.chunks, torch::Device(options.device));
  std::vector<Profile> profiles = {profile_with_loss(it, row.stages)};
  std::vector<Contender> contenders;
  for (const auto& scheduling : all_schedulings(row.stages, static_cast<int>(it.model->size()))) {
    const bool is_chosen = options.schedules.empty() || std::ranges::count(options.schedules, scheduling.schedule) > 0;
    if (is_chosen) contenders.emplace_back(it, row, scheduling, profiles.front(), options);
  }
  for (int repeat = 0; repeat < options.repeats; ++repeat) {
    for (auto& each : contenders) each.measure(it.input);
    profiles.push_back(profile_with_loss(it, row.stages));
  }
  for (const auto& each : contenders) each.print(profiles);
}

}  // namespace
}  // namespace gpipe::bench

int main(int argc, char** argv) {
  using namespace gpipe::bench;
  CLI::App app("Measured time and bytes of a step under each schedule, relative to the predictions.");
  Options options{.models = {"mlp", "unet", "resnet18", "resnet50"},
                  .chunks = {2, 4, 8},
                  .schedules = {},  // all
                  .repeats = 5};
  add_flags(app, options);
  return run_program(app, argc, argv, [&] { for_each_row(options, [&](const Row& row) { measure(row, options); }); });
}
