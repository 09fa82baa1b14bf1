// Speed-up of a pipeline with one core per stage over the unpartitioned model on one core. With --steps-only, prints the
// time of each step and the peak bytes of one.

#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>
#include <mutex>
#include <stdexcept>

#include "balance/balance.h"
#include "bench/measure.h"
#include "bench/program.h"
#include "gpipe/gpipe.h"
#include "gpipe/tensors/byte_counter.h"

namespace gpipe::bench {
namespace {

/// Counts the live bytes of all threads, above those at installation.
class LiveBytes : public AllocationListener {
 public:
  double peak() const { return static_cast<double>(peak_); }

 private:
  void allocated(const void*, std::int64_t bytes) override { add(bytes); }
  void freed(const void*, std::int64_t bytes) override { add(-bytes); }
  void add(std::int64_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    now_ += bytes;
    peak_ = std::max(peak_, now_);
  }

  std::mutex mutex_;
  std::int64_t now_ = 0;
  std::int64_t peak_ = 0;
};

// The peak bytes of a step above model and data, with the gradients.
double peak_bytes(GPipe& pipe, const torch::Tensor& input, const Row& row) {
  clear_gradients(pipe);
  const auto live = std::make_shared<LiveBytes>();
  const AllocationListener::Scope scope(live);
  step(pipe, input, row.schedule);
  return live->peak();
}

void measure(const Row& row, const Options& options, const std::shared_ptr<Ranks>& ranks) {
  if (ranks && options.balance.empty()) throw std::invalid_argument("--over-ranks needs --balance");
  auto it = subject(row.model, row.chunks, torch::Device(options.device));
  auto balance = options.balance;
  if (balance.empty()) balance = balance_by_time(row.stages, it.model, Value(it.input.narrow(0, 0, it.split_size)));
  if (ranks) {
    const auto [begin, end] = ranks->part(it.input.size(0));
    it.input = it.input.slice(0, begin, end);
  }
  auto pipe = make_pipe(it, balance, row, ranks);
  if (options.steps_only) {
    const auto times = interleave({[&] { step(pipe, it.input, row.schedule); }}, options.repeats);
    const auto bytes = peak_bytes(pipe, it.input, row);
    if (!ranks || ranks->rank() == 0) print_steps(row, {{"seconds", times[0]}, {"bytes", {bytes}}});
    return;
  }
  const auto times =
      interleave({[&] { step(it.model, it.input); }, [&] { step(pipe, it.input, row.schedule); }}, options.repeats);
  print({"speed", row, "times the unpartitioned model", quotients(times[0], times[1])});
}

}  // namespace
}  // namespace gpipe::bench

int main(int argc, char** argv) {
  using namespace gpipe::bench;
  CLI::App app("Speed of stages on one core each, relative to the unpartitioned model on one core.");
  Options options{.models = {"mlp", "unet", "resnet18", "resnet50"}, .chunks = {1, 2, 4, 8, 16}};
  add_flags(app, options);
  add_peer_flags(app, options);
  return run_program(app, argc, argv, [&] {
    const auto ranks = join_ranks(options);
    for_each_row(options, [&](Row row) {
      for (const auto& schedule : options.schedules) {
        row.schedule = schedule;
        measure(row, options, ranks);
      }
    });
  });
}
