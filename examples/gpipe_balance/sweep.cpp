// gpipe-balance sweep: predictions for all balances near the best, chunks and checkpoint modes.

#include <algorithm>
#include <iostream>
#include <set>

#include "balance/cut.h"
#include "balance/report.h"
#include "balance/search.h"
#include "examples/common/flags.h"
#include "examples/gpipe_balance/json.h"
#include "examples/gpipe_balance/model.h"
#include "examples/gpipe_balance/verbs.h"

namespace gpipe::examples::balance {
namespace {

void add_flags(CLI::App& app, Options& options) {
  add_chunks_list(app, options, "2, 4, 8");
  add_bandwidth_flag(app, options);
  add_memory_limit_flag(app, options);
  add_schedule_flags(app, options);
  app.add_option("--near", options.near, "most layers by which a cut is moved")->transform(whole_number(0, 1000));
}

std::vector<Candidate> candidates_of(const Options& options) {
  const auto search = options.search();
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
      const auto run = options.run(chunks, checkpoint);
      const auto best = balance_by_time(profile, options.stages, run);
      auto balances = stage.near(best, options.near);
      balances.push_back(best);
      for (const auto& balance : balances) candidates.push_back(make_candidate(profile, balance, run, search));
    }
  }
  std::stable_sort(candidates.begin(), candidates.end(), is_better);
  return candidates;
}

int run(const Options& options) {
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
  return {"sweep", "predictions of the balances near the best, for several chunks and all checkpoint modes", add_flags,
          run};
}

}  // namespace gpipe::examples::balance
