// Times steps of a pipeline, and of a plain loop over its micro-batches on one thread. Their ratio is the speed-up of a
// thread per stage; for the model `tiny`, their difference is the overhead of the cells.

#include <torch/utils.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <stdexcept>

#include "balance/balance.h"
#include "bench/measure.h"
#include "gpipe/gpipe.h"

namespace gpipe::bench {
namespace {

struct Program : Options {
  bool over_ranks = false;  ///< run over the processes that torchrun has started
  int replicas = 1;         ///< among which these are divided
};

void plain_step(Subject& it, bool recompute) {
  it.model->zero_grad();
  for (const auto& part : it.input.split(it.split_size)) {
    if (recompute) {
      const torch::NoGradGuard no_grad;
      it.model->forward(part);
    }
    it.model->forward(part).sum().backward();
  }
}

void measure(const Row& row, const Program& program, const std::shared_ptr<Ranks>& ranks) {
  if (ranks && program.balance.empty()) throw std::invalid_argument("--over-ranks needs --balance");
  auto it = subject(row.model, row.chunks, torch::Device(program.device));
  auto balance = program.balance;
  if (balance.empty()) balance = balance_by_time(row.stages, it.model, Value(it.input.narrow(0, 0, it.split_size)));
  auto options =
      GPipeOptions().split_size(it.split_size).checkpoint(row.checkpoint).intraop_threads(1).schedule(row.schedule);
  if (ranks) {
    const auto [begin, end] = ranks->part(it.input.size(0));
    it.input = it.input.slice(0, begin, end);
    options.ranks(ranks);
  } else {
    options.devices(std::vector<torch::Device>(static_cast<std::size_t>(row.stages), it.input.device()));
  }
  GPipe pipe(it.model, balance, options);
  const int steps = row.model == "tiny" ? 20 : 1;  // per measurement
  const auto repeat = [steps](const auto& function) {
    return [=] {
      for (int i = 0; i < steps; ++i) function();
    };
  };
  std::vector<std::function<void()>> functions = {repeat([&] { step(pipe, it.input); })};
  const bool prints = !ranks || ranks->rank() == 0;
  Subject whole{};
  if (prints) {
    whole = subject(row.model, row.chunks, torch::Device(program.device));
    functions.push_back(repeat([&] { plain_step(whole, row.checkpoint == Checkpoint::kAlways); }));
  }
  auto times = interleave(functions, program.repeats);
  for (auto& seconds : times) {
    for (auto& each : seconds) each /= steps;
  }
  if (prints) print("steps", row, {{"seconds", times[0]}, {"plain", times[1]}});
}

}  // namespace
}  // namespace gpipe::bench

int main(int argc, char** argv) {
  using namespace gpipe::bench;
  CLI::App app("Steps of a pipeline, and of a plain loop over the micro-batches on one thread.");
  Program program{
      {.models = {"tiny", "mlp", "unet", "resnet18", "resnet50"}, .chunks = {4, 8, 16}, .schedules = {"1f1b"}}};
  add_flags(app, program);
  app.add_flag("--over-ranks", program.over_ranks, "run over the processes that torchrun has started; rank 0 prints")
      ->excludes("--device");
  app.add_option("--replicas", program.replicas, "divide the processes among so many pipelines")
      ->needs("--over-ranks")
      ->check(CLI::PositiveNumber);
  return run_program(app, argc, argv, [&] {
    std::shared_ptr<gpipe::Ranks> ranks;
    if (program.over_ranks) ranks = gpipe::Ranks::from_environment(gpipe::RanksOptions().replicas(program.replicas));
    for_each_row(program, [&](Row row) {
      for (const auto& schedule : program.schedules) {
        row.schedule = schedule;
        measure(row, program, ranks);
      }
    });
  });
}
