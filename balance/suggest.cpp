#include "balance/suggest.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <functional>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>

#include "absl/strings/str_format.h"
#include "balance/restore_module.h"
#include "balance/trial.h"
#include "gpipe/micro_batch.h"

namespace gpipe {
namespace {

using Clock = std::chrono::steady_clock;

Value on(const Value& sample, torch::Device device) {
  auto tensors = sample.tensors();
  for (auto& tensor : tensors) tensor = tensor.to(device).detach().set_requires_grad(tensor.requires_grad());
  return Value(sample.form(), std::move(tensors));
}

/// The numbers of micro-batches that the wanted ones really make, each once.
std::vector<int> possible(std::vector<int> chunks, std::int64_t samples) {
  if (chunks.empty()) {
    for (int power = 1; power <= 32; power *= 2) chunks.push_back(power);
  }
  std::set<int> counts;
  for (const int wanted : chunks) {
    if (wanted < 1)
      throw std::invalid_argument(absl::StrFormat("[suggest] chunks must be positive, but has %d", wanted));
    counts.insert(static_cast<int>(micro_batch_sizes(samples, wanted, /*split_size=*/0).size()));
  }
  return {counts.begin(), counts.end()};
}

void check_devices(const std::vector<torch::Device>& devices) {
  if (devices.empty()) throw std::invalid_argument("[suggest] give at least one device");
}

/// As GPipe takes them: without an index an accelerator's first device is meant.
std::vector<torch::Device> with_index(std::vector<torch::Device> devices) {
  for (auto& device : devices) {
    if (!device.is_cpu() && !device.has_index()) device.set_index(0);
  }
  return devices;
}

/// Of the devices, each CPU stage being one of its own.
std::vector<std::string> names(const std::vector<torch::Device>& devices) {
  std::vector<std::string> names;
  for (const auto& device : devices) {
    names.push_back(device.is_cpu() ? absl::StrFormat("the CPU of stage %d", names.size()) : device.str());
  }
  return names;
}

void synchronize(const std::vector<torch::Device>& devices) {
  for (const auto& device : devices) {
    if (!device.is_cpu()) c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
  }
}

}  // namespace

bool copies_between(const std::vector<torch::Device>& devices) {
  const auto indexed = with_index(devices);
  return std::adjacent_find(indexed.begin(), indexed.end(), std::not_equal_to<>()) != indexed.end();
}

Suggestion suggest(const Model& model, const Value& sample, const std::vector<torch::Device>& wanted,
                   const SuggestOptions& options) {
  check_devices(wanted);
  const auto devices = with_index(wanted);
  const auto counts = possible(options.chunks(), batch_size(sample));
  const auto cpus = std::count_if(devices.begin(), devices.end(), [](const auto& device) { return device.is_cpu(); });
  auto profiling = options.profile();
  profiling.seconds(profiling.seconds() / static_cast<double>(counts.size()));
  if (devices.front().is_cpu()) profiling.workers(static_cast<int>(cpus));
  std::vector<ChunkedProfile> profiles;
  std::exception_ptr first_error;
  const auto& progress = options.profile().progress();
  double done = 0;
  for (const int chunks : counts) {
    if (progress)
      profiling.progress([&](double part) { progress((done + part) / static_cast<double>(counts.size())); });
    const auto sizes = micro_batch_sizes(batch_size(sample), chunks, /*split_size=*/0);
    const auto micro_batch = on(first_micro_batch(sample, sizes), devices.front());
    try {
      profiles.push_back({chunks, profile(model, micro_batch, profiling)});
    } catch (const std::runtime_error&) {
      // Nobody has asked for micro-batches that are too large for the device, nor for such small ones that batch norm
      // has less than two values a channel.
      if (!options.chunks().empty()) throw;
      if (!profiles.empty()) break;
      if (!first_error) first_error = std::current_exception();
    }
    ++done;
  }
  if (progress && done < static_cast<double>(counts.size())) progress(1);
  if (profiles.empty()) std::rethrow_exception(first_error);
  return search(std::move(profiles), {.stages = static_cast<int>(devices.size()),
                                      .checkpoints = options.checkpoints(),
                                      .memory_limit = options.memory_limit(),
                                      .devices = names(devices),
                                      .bandwidth = options.bandwidth(),
                                      .copies = copies_between(devices)});
}

std::vector<Measured> refine(const Model& model, const Value& sample, const std::vector<torch::Device>& wanted,
                             const Suggestion& suggestion, int candidates, int repeats, int intraop_threads) {
  check_devices(wanted);
  const auto devices = with_index(wanted);
  if (candidates < 1 || repeats < 1) {
    throw std::invalid_argument(
        absl::StrFormat("[refine] candidates and repeats must be positive, but are %d and %d", candidates, repeats));
  }
  suggestion.best();  // or why there is none
  const at::AutoGradMode grad_mode(true);
  const RestoreModule restore(model.module());
  std::vector<Measured> measured;
  for (const auto& candidate : suggestion.candidates) {
    if (!candidate.fits || static_cast<int>(measured.size()) == candidates) break;
    GPipe pipe(restore.watch(model.layers()), candidate.balance,
               GPipeOptions()
                   .devices(devices)
                   .chunks(candidate.chunks)
                   .checkpoint(candidate.checkpoint)
                   .intraop_threads(intraop_threads));
    pipe->train();
    std::vector<double> seconds;
    for (int repeat = -1; repeat < repeats; ++repeat) {  // one to warm up
      const auto batch = copy_of(sample);                // which the first layer may change
      synchronize(devices);
      const auto start = Clock::now();
      trial_step(pipe, batch);
      synchronize(devices);
      if (repeat >= 0) seconds.push_back(std::chrono::duration<double>(Clock::now() - start).count());
    }
    measured.push_back({candidate, median(seconds)});
  }
  restore.check();
  std::stable_sort(measured.begin(), measured.end(),
                   [](const Measured& a, const Measured& b) { return a.seconds < b.seconds; });
  return measured;
}

}  // namespace gpipe
