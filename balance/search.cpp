#include "balance/search.h"

#include <algorithm>
#include <memory>
#include <tuple>

#include "absl/strings/str_format.h"
#include "balance/cut.h"
#include "balance/predictor.h"
#include "balance/report.h"
#include "gpipe/base/checks.h"
#include "gpipe/schedules.h"

namespace gpipe {
namespace {

using absl::StrFormat;

void check_devices(const SearchOptions& options, std::size_t workers) {
  if (!options.devices.empty() && options.devices.size() != workers) {
    refuse_argument(options.devices.size(), " devices for ", workers, " workers; give one device per worker");
  }
}

/// The device with the most bytes, and their number.
std::pair<std::string, std::int64_t> fullest(const std::vector<std::int64_t>& bytes, const SearchOptions& options) {
  std::map<std::string, std::int64_t> of_device;
  for (std::size_t w = 0; w < bytes.size(); ++w) {
    of_device[options.devices.empty() ? StrFormat("device %d", w) : options.devices[w]] += bytes[w];
  }
  return *std::ranges::max_element(of_device, {}, [](const auto& each) { return each.second; });
}

/// Where a search begins: balances for a number of stages, a placement and a checkpoint mode.
using Starts = std::map<std::tuple<int, std::vector<int>, Checkpoint>, std::vector<std::vector<std::int64_t>>>;

std::vector<std::vector<std::int64_t>> starts(const Profile& profile, int stages, const RunOptions& run,
                                              const SearchOptions& options) {
  std::vector<std::vector<std::int64_t>> balances = {balance_by_time(profile, stages, run)};
  const bool links_take_time = run.network.inside.bandwidth > 0 || run.network.between.bandwidth > 0;
  if (links_take_time && !run.scheduling.placement.empty()) balances.push_back(balance_by_load(profile, run));
  const auto limit = options.memory_limit;
  if (limit == 0 || StageCost(profile).most_bytes(balances.front(), run) <= limit) return balances;
  auto within = balance_within(limit, profile, stages, run);
  balances.push_back(within.empty() ? balance_by_size(profile, stages, run) : std::move(within));
  return balances;
}

Candidate candidate_of(PredictedStep step, const RunOptions& run, const SearchOptions& options) {
  check_devices(options, step.bytes.size());
  const bool fits = options.memory_limit <= 0 || fullest(step.bytes, options).second <= options.memory_limit;
  return {std::move(step), run.chunks, run.checkpoint, run.scheduling.schedule, run.network.replicas, fits};
}

/// A candidate that may be improved.
struct Contender {
  Candidate with(const std::vector<std::int64_t>& balance, const SearchOptions& options) const {
    return candidate_of(predictor->predict(balance), run, options);
  }

  const Profile* profile;
  RunOptions run;
  std::unique_ptr<Predictor> predictor;
  Candidate best = {};
};

/// Moves cuts. Takes the simulated actions off `budget`, and ends when there is none left.
void improve(Contender& contender, const SearchOptions& options, std::int64_t& budget) {
  const StageCost stage(*contender.profile);
  const auto actions =
      static_cast<std::int64_t>(contender.best.balance.size()) * contender.run.chunks * 4;  // F, R, I, W
  for (bool improved = true; improved;) {
    improved = false;
    for (const auto& balance : stage.near(contender.best.balance, 1)) {
      if ((budget -= actions) < 0) return;
      auto moved = contender.with(balance, options);
      if (!is_better(moved, contender.best, options)) continue;
      contender.best = std::move(moved);
      improved = true;
    }
  }
}

/// The smallest number of stages such that each fits into the limit; 0 if a single layer does not.
int fewest_stages(const StageCost& cost, const RunOptions& run, std::int64_t limit) {
  std::vector<int> stages(cost.layers() + 1, 0);  // for layers 0..i-1; 0 for impossible
  for (int end = 1; end <= cost.layers(); ++end) {
    for (int first = end; cost.can_cut_before(end) && first-- > 0;) {
      if (cost.least_bytes(first, end, run) > limit) break;
      const bool possible = first == 0 || stages[first] > 0;
      if (!possible || (stages[end] > 0 && stages[end] <= stages[first] + 1)) continue;
      if (cost.bytes(first, end, run) <= limit) stages[end] = stages[first] + 1;
    }
  }
  return stages.back();
}

/// Explains why no candidate fits. `smallest` is the candidate that needs the fewest bytes.
std::string why_not(const Candidate& smallest, const Profile& profile, const SearchOptions& options) {
  const auto [device, most] = fullest(smallest.bytes, options);
  const auto reason = StrFormat(
      "[suggest] nothing fits into %s per device: the smallest candidate, %s%d chunks and checkpoint %s, needs %s on "
      "%s, %s too much; ",
      bytes_to_text(options.memory_limit), smallest.schedule.empty() ? "" : smallest.schedule + " with ",
      smallest.chunks, to_string(smallest.checkpoint), bytes_to_text(most), device,
      bytes_to_text(most - options.memory_limit));
  const RunOptions run{smallest.chunks, smallest.checkpoint, options.network, options.copies};
  const StageCost cost(profile);
  for (int layer = 0; layer < cost.layers(); ++layer) {
    const auto alone = cost.bytes(layer, layer + 1, run);
    if (alone <= options.memory_limit) continue;
    return reason + StrFormat(
                        "layer '%s' alone needs %s with all micro-batches, so more devices may not help: use a smaller "
                        "layer or a smaller mini-batch",
                        profile.layers[layer].name, bytes_to_text(alone));
  }
  const int stages = fewest_stages(cost, run, options.memory_limit);
  const auto per_replica = smallest.replicas > 1 ? " per replica" : "";
  const auto more =
      stages > static_cast<int>(smallest.bytes.size()) ? StrFormat("use %d devices%s, or ", stages, per_replica) : "";
  return reason + more + StrFormat("use devices with %s, or a smaller mini-batch", bytes_to_text(most));
}

}  // namespace

const Candidate& Candidates::best() const {
  if (!fits()) throw std::runtime_error(reason);
  return candidates.front();
}

const Profile& Suggestion::profile_of(const Candidate& candidate) const {
  for (const auto& [chunks, profile] : profiles) {
    if (chunks == candidate.chunks) return profile;
  }
  refuse_argument("no profile was made for ", candidate.chunks, " chunks");
}

Candidate make_candidate(const Profile& profile, const std::vector<std::int64_t>& balance, const RunOptions& run,
                         const SearchOptions& options) {
  return candidate_of(predict(profile, balance, run), run, options);
}

bool is_better(const Candidate& a, const Candidate& b, const SearchOptions& options) {
  if (a.fits != b.fits) return a.fits;
  return a.fits ? a.seconds < b.seconds : fullest(a.bytes, options).second < fullest(b.bytes, options).second;
}

std::vector<Scheduling> all_schedulings(int workers, int layers) {
  std::vector<Scheduling> found;
  std::vector<Schedule> lists;
  const auto add = [&](const ScheduleRule& rule, std::vector<int> placement) {
    const Layout layout{static_cast<int>(placement.size()), 2 * workers, placement};
    if (layout.workers() != workers || !rule.misfit(layout).empty()) return;
    if (!too_few_stages(rule.name, layout.placement).empty()) return;
    auto schedule = rule.generate(layout);
    if (std::find(lists.begin(), lists.end(), schedule) != lists.end()) return;
    lists.push_back(std::move(schedule));
    found.push_back({std::string(rule.name), 1, std::move(placement)});
  };
  for (const auto& rule : schedule_rules()) add(rule, looped_placement(workers, workers));
  if (workers == 1 || 2 * workers > layers) return found;
  for (const auto& rule : schedule_rules()) {
    add(rule, looped_placement(workers, 2 * workers));
    add(rule, v_placement(2 * workers));
  }
  return found;
}

Suggestion search(std::vector<ChunkedProfile> profiles, const SearchOptions& options) {
  if (profiles.empty()) refuse_argument("give at least one profile");
  if (options.schedulings.empty()) refuse_argument("give at least one schedule");
  if (options.checkpoints.empty()) refuse_argument("give at least one checkpoint mode");
  if (options.memory_limit < 0) refuse_argument("memory_limit must not be negative, but is ", options.memory_limit);
  std::vector<Contender> contenders;
  for (const auto& [chunks, profile] : profiles) {
    const int most_stages = StageCost(profile).most_stages();
    Starts known;
    for (const auto checkpoint : options.checkpoints) {
      for (const auto& scheduling : options.schedulings) {
        const RunOptions run{chunks, checkpoint, options.network, options.copies, scheduling};
        const int stages =
            scheduling.placement.empty() ? options.stages : static_cast<int>(scheduling.placement.size());
        if (stages > most_stages && options.schedulings.size() > 1) continue;
        auto& balances = known[{stages, scheduling.placement, checkpoint}];
        if (balances.empty()) balances = starts(profile, stages, run, options);
        Contender contender{&profile, run, std::make_unique<Predictor>(profile, stages, run)};
        contender.best = contender.with(balances.front(), options);
        for (std::size_t i = 1; i < balances.size(); ++i) {
          auto other = contender.with(balances[i], options);
          if (is_better(other, contender.best, options)) contender.best = std::move(other);
        }
        contenders.push_back(std::move(contender));
      }
    }
  }
  if (contenders.empty()) {
    refuse_argument("every schedule has more stages than the ", StageCost(profiles.front().profile).most_stages(),
                    " that the model allows; use fewer devices");
  }
  const auto before = [&](const Contender& a, const Contender& b) { return is_better(a.best, b.best, options); };
  std::stable_sort(contenders.begin(), contenders.end(), before);
  auto budget = options.most_actions;
  for (auto& contender : contenders) {
    if (budget > 0) improve(contender, options, budget);
  }
  std::stable_sort(contenders.begin(), contenders.end(), before);
  Suggestion suggestion;
  for (auto& contender : contenders) suggestion.candidates.push_back(contender.best);
  if (!suggestion.candidates.front().fits) {
    suggestion.reason = why_not(contenders.front().best, *contenders.front().profile, options);
  }
  suggestion.profiles = std::move(profiles);
  return suggestion;
}

}  // namespace gpipe
