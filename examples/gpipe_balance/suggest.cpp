// gpipe-balance suggest: searches for the fastest schedule, balance, chunks and checkpoint mode, on devices or a cluster.

#include "balance/suggest.h"

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <iostream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "balance/report.h"
#include "examples/common/files.h"
#include "examples/common/flags.h"
#include "examples/common/percent.h"
#include "examples/gpipe_balance/cluster.h"
#include "examples/gpipe_balance/json.h"
#include "examples/gpipe_balance/model.h"
#include "examples/gpipe_balance/verbs.h"
#include "gpipe/schedule/schedule_text.h"
#include "gpipe/schedules.h"

namespace gpipe::examples::balance {
namespace {

void add_flags(CLI::App& app, Options& options) {
  add_chunks_list(app, options, "1, 2, 4, .. 32");
  add_bandwidth_flag(app, options);
  add_memory_limit_flag(app, options);
  add_schedule_flags(app, options, /*any=*/true);
  add_layers_flag(app, options);
  app.add_option("--refine", options.refine, "number of the best candidates to run and time")
      ->transform(whole_number(0, 100));
  app.add_option("--save-schedule", options.save_schedule,
                 "file for a schedule made for the measured times of the best candidate, if it is faster")
      ->transform(path_name())
      ->always_capture_default(false);
  add_cluster_flags(app, options);
}

const char* code_of(Checkpoint mode) {
  switch (mode) {
    case Checkpoint::kNever:
      return "kNever";
    case Checkpoint::kExceptLast:
      return "kExceptLast";
    case Checkpoint::kAlways:
      break;
  }
  return "kAlways";
}

std::string code_of(const torch::Device& device) {
  return device.is_cpu() ? "torch::kCPU" : absl::StrFormat("torch::Device(\"%s\")", device.str());
}

/// C++ of the options that differ from their defaults, on a line of its own.
std::string code_of_schedule(const Candidate& candidate) {
  std::string code;
  if (!candidate.schedule.empty()) absl::StrAppend(&code, ".schedule(\"", candidate.schedule, "\")");
  const auto stages = candidate.placement.size();
  switch (placed_by(candidate)) {
    case PlacedBy::kSchedule:
      break;
    case PlacedBy::kStagesPerWorker:
      absl::StrAppend(&code, ".stages_per_worker(", stages / candidate.bytes.size(), ")");
      break;
    case PlacedBy::kV:
      absl::StrAppend(&code, ".placement(gpipe::v_placement(", stages, "))");
      break;
    case PlacedBy::kPlacement:
      absl::StrAppend(&code, ".placement({", absl::StrJoin(candidate.placement, ", "), "})");
      break;
  }
  return code.empty() ? "" : "\n                      " + code;
}

/// C++ that makes the pipeline of a candidate.
std::string code_of(const Candidate& candidate, const std::vector<torch::Device>& devices) {
  const auto append = [](std::string* text, const torch::Device& device) { absl::StrAppend(text, code_of(device)); };
  return absl::StrFormat(
      "gpipe::GPipe pipe(model, {%s},\n"
      "                  gpipe::GPipeOptions().devices({%s}).chunks(%d).checkpoint(gpipe::Checkpoint::%s)%s);\n",
      absl::StrJoin(candidate.balance, ", "), absl::StrJoin(devices, ", ", append), candidate.chunks,
      code_of(candidate.checkpoint), code_of_schedule(candidate));
}

Json to_json(const Suggestion& suggestion, const std::vector<Measured>& measured) {
  Json json{{"reason", suggestion.reason}, {"candidates", Json::array()}, {"measured", Json::array()}};
  for (const auto& candidate : suggestion.candidates) json["candidates"].push_back(balance::to_json(candidate));
  for (const auto& [candidate, seconds] : measured) {
    json["measured"].push_back(balance::to_json(candidate));
    json["measured"].back()["measured_seconds"] = seconds;
  }
  json["unpartitioned"] = suggestion.unpartitioned ? balance::to_json(*suggestion.unpartitioned) : Json();
  return json;
}

/// Writes a schedule made for the measured times of a candidate, if it is faster. Then returns the candidate with it.
Candidate with_own_schedule(const Suggestion& suggestion, Candidate candidate, const Options& options,
                            std::ostream& out) {
  const auto made = tailored_schedule(suggestion.profile_of(candidate), candidate, options.search());
  if (!made || made->seconds >= candidate.seconds) {
    out << "no schedule for the measured times is faster; " << options.save_schedule << " is not written\n";
    return candidate;
  }
  write_file(options.save_schedule, to_text(made->schedule));
  out << "a schedule for the measured times takes " << seconds_to_text(made->seconds) << " per step; written to "
      << options.save_schedule << "\n";
  candidate.schedule = "@" + options.save_schedule;
  candidate.seconds = made->seconds;
  return candidate;
}

void print(const Suggestion& suggestion, const std::vector<Measured>& measured, const Options& options) {
  auto best = measured.empty() ? suggestion.candidates.front() : measured.front().candidate;
  if (options.layers) std::cout << profile_table(suggestion.profile_of(best), best.balance) << "\n";
  std::cout << candidate_table(suggestion.candidates, suggestion.unpartitioned);
  for (const auto& [candidate, seconds] : measured) {
    std::cout << "measured " << seconds_to_text(seconds) << " per step: balance " << balance_to_text(candidate.balance)
              << ", " << candidate.chunks << " chunks, checkpoint " << to_string(candidate.checkpoint)
              << (candidate.schedule.empty() ? "" : ", schedule " + candidate.schedule) << "\n";
  }
  if (!suggestion.fits()) return;
  if (!options.save_schedule.empty()) best = with_own_schedule(suggestion, std::move(best), options, std::cout);
  std::cout << "\n" << code_of(best, options.place());
}

int run(const Options& options) {
  if (!options.cluster.empty()) return run_cluster(options);
  const auto model = make_model(options);
  const auto batch = make_batch(options);
  const auto devices = options.place();
  Suggestion suggestion;
  {
    Percent percent(std::cerr, isatty(STDERR_FILENO) != 0, "measuring " + options.model);
    suggestion = suggest(model, batch, devices,
                         SuggestOptions()
                             .chunks(options.chunks_to_try)
                             .memory_limit(options.memory)
                             .bandwidth(options.bandwidth * 1e9)
                             .scheduling(options.scheduling())
                             .profile(options.profiling().progress([&](double part) { percent.show(part); })));
  }
  std::vector<Measured> measured;
  if (options.refine > 0 && suggestion.fits()) {
    measured =
        refine(model, batch, devices, suggestion, options.refine, /*repeats=*/5, options.profiling().intraop_threads());
  }
  if (options.json) {
    if (suggestion.fits() && !options.save_schedule.empty()) {
      with_own_schedule(suggestion, suggestion.best(), options, std::cerr);
    }
    std::cout << to_json(suggestion, measured) << "\n";
  } else {
    print(suggestion, measured, options);
  }
  if (suggestion.fits()) return 0;
  std::cerr << "error: " << suggestion.reason << "\n";
  return 1;
}

}  // namespace

Verb suggest_verb() { return {"suggest", "the fastest schedule, balance, chunks and checkpoint mode", add_flags, run}; }

}  // namespace gpipe::examples::balance
