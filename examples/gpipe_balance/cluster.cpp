#include "examples/gpipe_balance/cluster.h"

#include <CLI/CLI.hpp>
#include <iostream>

#include "balance/cluster_plan.h"
#include "balance/report.h"
#include "examples/common/flags.h"
#include "examples/gpipe_balance/json.h"
#include "examples/gpipe_balance/model.h"

namespace gpipe::examples::balance {
namespace {

std::vector<Profile> profiles_of(const Options& options) {
  std::vector<Profile> profiles;
  for (const auto& path : options.profiles) profiles.push_back(profile_from_json(read_text(path, kMaxProfileJson)));
  if (!profiles.empty()) return profiles;
  auto measured = options;
  measured.stages = 1;
  measured.seconds /= static_cast<double>(options.micro_batches.size());
  for (const int samples : options.micro_batches) {
    measured.batch_size = samples;
    profiles.push_back(profile_of(measured, /*chunks=*/1));
  }
  return profiles;
}

Json to_json(const ClusterPlan& plan) {
  Json json{{"reason", plan.reason}, {"candidates", Json::array()}};
  for (const auto& candidate : plan.candidates) json["candidates"].push_back(balance::to_json(candidate));
  return json;
}

}  // namespace

void add_cluster_flags(CLI::App& app, Options& options) {
  auto* cluster = app.add_option("--cluster", options.cluster,
                                 "JSON file of a cluster: also choose the number of replicas, for all its devices");
  cluster->check(CLI::ExistingFile)->always_capture_default(false);
  for (const char* flag : {"--stages", "--chunks", "--memory-limit", "--bandwidth", "--stages-per-worker", "--refine",
                           "--save-schedule", "--layers"}) {
    cluster->excludes(app.get_option(flag));
  }
  auto* sizes = app.add_option("--micro-batch", options.micro_batches,
                               "with --cluster: numbers of images per micro-batch to measure and try, e.g. 2,4")
                    ->needs(cluster)
                    ->delimiter(',')
                    ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
                    ->transform(whole_number(1, kMaxCount));
  auto* profiles =
      app.add_option("--profile", options.profiles,
                     "with --cluster: files written by 'profile --output', one per size of micro-batch; use "
                     "them instead of measuring")
          ->needs(cluster)
          ->delimiter(',')
          ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
          ->check(CLI::ExistingFile)
          ->always_capture_default(false)
          ->excludes(sizes);
  for (const char* flag : {"--model", "--channels", "--size", "--devices", "--seconds", "--param-scale"}) {
    profiles->excludes(app.get_option(flag));
  }
}

int run_cluster(const Options& options) {
  const auto cluster = cluster_from_json(read_text(options.cluster, kMaxClusterJson));
  const auto schedule = options.schedule == kForward ? "" : options.schedule;
  const auto plan = plan_cluster(cluster, profiles_of(options), {.samples = options.batch_size, .schedule = schedule});
  if (options.json) {
    std::cout << to_json(plan) << "\n";
  } else {
    std::cout << plan_table(plan);
  }
  if (plan.fits()) return 0;
  std::cerr << "error: " << plan.reason << "\n";
  return 1;
}

}  // namespace gpipe::examples::balance
