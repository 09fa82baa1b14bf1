// Memory of a step: the peak bytes of tensors above model and data, including gradients.

#include <CLI/CLI.hpp>
#include <algorithm>
#include <iostream>
#include <mutex>

#include "balance/balance.h"
#include "bench/measure.h"
#include "bench/subject.h"
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

GPipe balanced_pipe(const Subject& it, const Row& row, const Options& options) {
  auto balance = options.balance;
  if (balance.empty()) {
    const Value micro_batch(it.input.narrow(0, 0, it.split_size));
    balance = balance_by_time(row.stages, it.model, micro_batch, ProfileOptions().seconds(1));
  }
  return make_pipe(it, balance, row);
}

void measure_peak(const Row& row, const Options& options) {
  const auto it = subject(row.model, row.chunks);
  auto pipe = balanced_pipe(it, row, options);
  for (int i = 0; i < 2; ++i) step(pipe, it.input, row);
  Measurement line{"memory", row, "bytes", {}};
  for (int i = 0; i < options.repeats; ++i) {
    clear_gradients(pipe);
    const auto live = std::make_shared<LiveBytes>();
    const AllocationListener::Scope scope(live);
    step(pipe, it.input, row);
    line.values.push_back(live->peak());
  }
  if (options.steps_only) return print_steps(std::cout, row, "bytes", line.values);
  print(std::cout, line);
}

}  // namespace
}  // namespace gpipe::bench

int main(int argc, char** argv) {
  using namespace gpipe::bench;
  using gpipe::Checkpoint;
  CLI::App app("Peak bytes of a step.");
  Options options{.models = kPeerSubjects,
                  .chunks = {8},
                  .checkpoints = {Checkpoint::kNever, Checkpoint::kExceptLast, Checkpoint::kAlways}};
  add_flags(app, options);
  add_model_flag(app, options);
  add_steps_flag(app, options);
  add_stages_flag(app, options);
  add_balance_flag(app, options);
  add_schedule_flag(app, options);
  add_short_flag(app, options, {Checkpoint::kNever, Checkpoint::kAlways});
  return run_program(app, argc, argv,
                     [&] { for_each_row(options, [&](const Row& row) { measure_peak(row, options); }); });
}
