// gpipe-balance sweep: predictions for all balances near the best, chunks, checkpoint modes and schedules.

#include <algorithm>
#include <iostream>
#include <iterator>
#include <set>
#include <stdexcept>

#include "absl/strings/str_format.h"
#include "balance/cut.h"
#include "balance/report.h"
#include "balance/search.h"
#include "balance/suggest.h"
#include "examples/common/flags.h"
#include "examples/gpipe_balance/json.h"
#include "examples/gpipe_balance/model.h"
#include "examples/gpipe_balance/verbs.h"
#include "gpipe/schedules.h"

namespace gpipe::examples::balance {
namespace {

void add_flags(CLI::App& app, Options& options) {
  add_chunks_list(app, options, "2, 4, 8");
  add_bandwidth_flag(app, options);
  add_memory_limit_flag(app, options);
  add_schedule_list(app, options);
  app.add_option("--near", options.near, "most layers by which a cut is moved")->transform(whole_number(0, 1000));
}

/// The schedules to try, with their placements: the only one of --schedule, or of several those that fit --stages workers.
std::vector<Scheduling> schedulings(const Options& options) {
  if (options.schedule != kAnySchedule) return {options.scheduling()};
  const auto layers = static_cast<int>(make_model(options)->size());
  auto every = all_schedulings(options.stages, layers);
  std::vector<Scheduling> found;
  for (const auto& name : options.schedules_to_try) {
    const auto before = found.size();
    if (name == kForward) found.push_back({.placement = looped_placement(options.stages, options.stages)});
    std::copy_if(every.begin(), every.end(), std::back_inserter(found), [&](const Scheduling& it) {
      const auto per_worker = static_cast<int>(it.placement.size()) / options.stages;
      return (name == kAnySchedule || name == it.schedule) &&
             (options.stages_per_worker == 1 || per_worker == options.stages_per_worker);
    });
    if (found.size() > before) continue;
    throw std::invalid_argument(absl::StrFormat(
        "--schedule %s is none of the schedules that suggest tries for %d workers and %d layers; give it "
        "alone, or leave it out",
        name, options.stages, layers));
  }
  return found;
}

std::vector<Candidate> candidates_of(const Options& options) {
  const auto search = options.search();
  const auto schedules = schedulings(options);
  std::set<int> counts;  // of micro-batches; fewer than chunks if there are too few images
  for (const int chunks : options.chunks_to_try.empty() ? std::vector<int>{2, 4, 8} : options.chunks_to_try) {
    counts.insert(static_cast<int>(options.sizes(chunks).size()));
  }
  auto per_profile = options;
  per_profile.seconds /= static_cast<double>(counts.size());
  std::vector<Candidate> candidates;
  for (const int chunks : counts) {
    const auto profile = profile_of(per_profile, chunks);
    const StageCost stage(profile);
    for (const auto& [name, checkpoint] : checkpoints()) {
      auto run = options.run(chunks, checkpoint);
      for (const auto& scheduling : schedules) {
        run.scheduling = scheduling;
        const auto best = balance_by_time(profile, static_cast<int>(scheduling.placement.size()), run);
        auto balances = stage.near(best, options.near);
        balances.push_back(best);
        for (const auto& balance : balances) candidates.push_back(make_candidate(profile, balance, run, search));
      }
    }
  }
  std::stable_sort(candidates.begin(), candidates.end(), is_better);
  return candidates;
}

int run(const Options& given) {
  auto options = given;
  const auto& names = options.schedules_to_try;
  options.schedule = names.size() == 1 ? names.front() : kAnySchedule;
  const auto candidates = candidates_of(options);
  if (!options.json) {
    std::cout << candidate_table(candidates);
    return 0;
  }
  auto json = Json::array();
  for (const auto& candidate : candidates) json.push_back(to_json(candidate));
  std::cout << json << "\n";
  return 0;
}

}  // namespace

Verb sweep_verb() {
  return {"sweep", "predictions of the balances near the best, for several chunks, checkpoint modes and schedules",
          add_flags, run};
}

}  // namespace gpipe::examples::balance
