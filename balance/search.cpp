#include "balance/search.h"

#include <algorithm>
#include <limits>
#include <map>
#include <stdexcept>
#include <utility>

#include "absl/strings/str_format.h"
#include "balance/cut.h"
#include "balance/report.h"

namespace gpipe {
namespace {

using absl::StrFormat;

void check_devices(const SearchOptions& options, std::size_t workers) {
  if (options.devices.empty() || options.devices.size() == workers) return;
  throw std::invalid_argument(
      StrFormat("[suggest] %d devices for %d workers; give one device per worker", options.devices.size(), workers));
}

RunOptions run_options(int chunks, Checkpoint checkpoint, const SearchOptions& options) {
  return {chunks, checkpoint, options.bandwidth, options.copies, options.scheduling};
}

/// The device with the most bytes, and their number.
std::pair<std::string, std::int64_t> fullest(const std::vector<std::int64_t>& bytes, const SearchOptions& options) {
  std::map<std::string, std::int64_t> of_device;
  for (std::size_t w = 0; w < bytes.size(); ++w) {
    of_device[options.devices.empty() ? StrFormat("device %d", w) : options.devices[w]] += bytes[w];
  }
  return *std::max_element(of_device.begin(), of_device.end(),
                           [](const auto& a, const auto& b) { return a.second < b.second; });
}

std::int64_t limit_of(const SearchOptions& options) {
  return options.memory_limit > 0 ? options.memory_limit : std::numeric_limits<std::int64_t>::max();
}

class Search {
 public:
  Search(const Profile& profile, const RunOptions& run, const SearchOptions& options)
      : profile_(profile), run_(run), options_(options), stage_(profile), limit_(limit_of(options)) {}

  Candidate best() const {
    auto balance = options_.memory_limit > 0 ? balance_within(limit_, profile_, options_.stages, run_)
                                             : balance_by_time(profile_, options_.stages, run_);
    if (balance.empty()) balance = balance_by_size(profile_, options_.stages, run_);
    return improve(of(balance));
  }

 private:
  Candidate of(const std::vector<std::int64_t>& balance) const {
    return make_candidate(profile_, balance, run_, options_);
  }

  bool better(const Candidate& a, const Candidate& b) const {
    if (a.fits || b.fits) return is_better(a, b);
    return fullest(a.bytes, options_).second < fullest(b.bytes, options_).second;
  }

  Candidate improve(Candidate best) const {
    for (bool improved = true; improved;) {
      improved = false;
      for (const auto& balance : stage_.near(best.balance, 1)) {
        auto moved = of(balance);
        if (!better(moved, best)) continue;
        best = std::move(moved);
        improved = true;
      }
    }
    return best;
  }

  const Profile& profile_;
  const RunOptions run_;
  const SearchOptions& options_;
  const StageCost stage_;
  const std::int64_t limit_;
};

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
      "[suggest] nothing fits into %s per device: the smallest candidate, %d chunks and checkpoint %s, needs %s on %s, "
      "%s too much; ",
      bytes_to_text(options.memory_limit), smallest.chunks, to_string(smallest.checkpoint), bytes_to_text(most), device,
      bytes_to_text(most - options.memory_limit));
  const auto run = run_options(smallest.chunks, smallest.checkpoint, options);
  const StageCost cost(profile);
  for (int layer = 0; layer < cost.layers(); ++layer) {
    const auto alone = cost.bytes(layer, layer + 1, run);
    if (alone <= options.memory_limit) continue;
    return reason + StrFormat(
                        "layer '%s' alone needs %s, so more devices do not help: use a smaller layer or a smaller "
                        "mini-batch",
                        profile.layers[layer].name, bytes_to_text(alone));
  }
  const int stages = fewest_stages(cost, run, options.memory_limit);
  const auto more = stages > options.stages ? StrFormat("use %d devices, or ", stages) : "";
  return reason + more + StrFormat("use devices with %s, or a smaller mini-batch", bytes_to_text(most));
}

}  // namespace

const Candidate& Suggestion::best() const {
  if (!fits()) throw std::runtime_error(reason);
  return candidates.front();
}

const Profile& Suggestion::profile_of(const Candidate& candidate) const {
  for (const auto& [chunks, profile] : profiles) {
    if (chunks == candidate.chunks) return profile;
  }
  throw std::invalid_argument(StrFormat("[suggest] no profile was made for %d chunks", candidate.chunks));
}

Candidate make_candidate(const Profile& profile, const std::vector<std::int64_t>& balance, const RunOptions& run,
                         const SearchOptions& options) {
  auto prediction = predict(profile, balance, run);
  check_devices(options, prediction.bytes.size());
  const bool fits = fullest(prediction.bytes, options).second <= limit_of(options);
  return {balance,
          run.chunks,
          run.checkpoint,
          run.scheduling.schedule,
          std::move(prediction.placement),
          prediction.seconds,
          prediction.bubble,
          std::move(prediction.bytes),
          fits};
}

bool is_better(const Candidate& a, const Candidate& b) { return a.fits != b.fits ? a.fits : a.seconds < b.seconds; }

Suggestion search(std::vector<ChunkedProfile> profiles, const SearchOptions& options) {
  if (profiles.empty()) throw std::invalid_argument("[suggest] give at least one profile");
  if (options.checkpoints.empty()) throw std::invalid_argument("[suggest] give at least one checkpoint mode");
  if (options.memory_limit < 0 || !(options.bandwidth >= 0)) {
    throw std::invalid_argument(
        StrFormat("[suggest] memory_limit and bandwidth must not be negative, but are %d and %g", options.memory_limit,
                  options.bandwidth));
  }
  Suggestion suggestion;
  const Profile* of_smallest = nullptr;
  std::int64_t least = std::numeric_limits<std::int64_t>::max();
  Candidate smallest;
  for (const auto& [chunks, profile] : profiles) {
    for (const auto checkpoint : options.checkpoints) {
      auto candidate = Search(profile, run_options(chunks, checkpoint, options), options).best();
      if (const auto most = fullest(candidate.bytes, options).second; most < least) {
        least = most;
        smallest = candidate;
        of_smallest = &profile;
      }
      suggestion.candidates.push_back(std::move(candidate));
    }
  }
  std::stable_sort(suggestion.candidates.begin(), suggestion.candidates.end(), is_better);
  if (!suggestion.candidates.front().fits) suggestion.reason = why_not(smallest, *of_smallest, options);
  suggestion.profiles = std::move(profiles);
  return suggestion;
}

}  // namespace gpipe
