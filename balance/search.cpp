#include "balance/search.h"

#include <algorithm>
#include <limits>
#include <stdexcept>

#include "absl/strings/str_format.h"
#include "balance/cut.h"
#include "balance/report.h"

namespace gpipe {
namespace {

using absl::StrFormat;

std::int64_t largest(const std::vector<std::int64_t>& bytes) { return *std::max_element(bytes.begin(), bytes.end()); }

class Search {
 public:
  Search(const Profile& profile, const RunOptions& run, const SearchOptions& options)
      : profile_(profile),
        run_(run),
        options_(options),
        stage_(profile),
        limit_(options.memory_limit > 0 ? options.memory_limit : std::numeric_limits<std::int64_t>::max()) {}

  Candidate best() const {
    auto balance = balance_within(limit_, profile_, options_.stages, run_);
    if (balance.empty()) balance = balance_by_size(profile_, options_.stages, run_);
    return improve(of(balance));
  }

 private:
  Candidate of(const std::vector<std::int64_t>& balance) const {
    auto prediction = predict(profile_, balance, run_);
    const bool fits = largest(prediction.bytes) <= limit_;
    return {balance, run_.chunks, run_.checkpoint, prediction.seconds, prediction.bubble, std::move(prediction.bytes),
            fits};
  }

  bool better(const Candidate& a, const Candidate& b) const {
    if (a.fits != b.fits) return a.fits;
    return a.fits ? a.seconds < b.seconds : largest(a.bytes) < largest(b.bytes);
  }

  Candidate improve(Candidate best) const {
    for (bool improved = true; improved;) {
      improved = false;
      for (std::size_t s = 0; s + 1 < best.balance.size(); ++s) {
        for (const int layers : {-1, 1}) {
          auto balance = best.balance;
          balance[s] += layers;
          balance[s + 1] -= layers;
          if (!possible(balance)) continue;
          auto moved = of(balance);
          if (!better(moved, best)) continue;
          best = std::move(moved);
          improved = true;
        }
      }
    }
    return best;
  }

  bool possible(const std::vector<std::int64_t>& balance) const {
    int end = 0;
    for (const auto layers : balance) {
      if (layers < 1) return false;
      end += static_cast<int>(layers);
      if (!stage_.can_cut_before(end)) return false;
    }
    return true;
  }

  const Profile& profile_;
  const RunOptions run_;
  const SearchOptions& options_;
  const StageCost stage_;
  const std::int64_t limit_;
};

/// `leanest` needs the least of those that do not fit.
std::string why_not(const Candidate& leanest, const Profile& profile, const SearchOptions& options) {
  const auto most = std::max_element(leanest.bytes.begin(), leanest.bytes.end());
  const auto stage = most - leanest.bytes.begin();
  auto reason = StrFormat(
      "[suggest] nothing fits into %s a device: the leanest way, %d chunks and checkpoint %s, needs %s on device %d, "
      "%s "
      "too many; ",
      bytes_to_text(options.memory_limit), leanest.chunks, to_string(leanest.checkpoint), bytes_to_text(*most), stage,
      bytes_to_text(*most - options.memory_limit));
  const RunOptions run{leanest.chunks, leanest.checkpoint, options.bandwidth};
  const StageCost cost(profile);
  for (int layer = 0; layer < cost.layers(); ++layer) {
    const auto alone = cost.bytes(layer, layer + 1, run);
    if (alone <= options.memory_limit) continue;
    return reason + StrFormat(
                        "layer %d ('%s') alone needs %s, which more devices do not change: make it smaller, or "
                        "the mini-batch",
                        layer, profile.layers[layer].name, bytes_to_text(alone));
  }
  for (int stages = options.stages + 1; stages <= cost.layers(); ++stages) {
    if (balance_within(options.memory_limit, profile, stages, run).empty()) continue;
    return reason +
           StrFormat("%d devices would do, or devices of %s, or a smaller mini-batch", stages, bytes_to_text(*most));
  }
  return reason + StrFormat("devices of %s would do, or a smaller mini-batch", bytes_to_text(*most));
}

}  // namespace

const Candidate& Suggestion::best() const {
  if (!fits()) throw std::runtime_error(reason);
  return candidates.front();
}

Suggestion search(const std::vector<ChunkedProfile>& profiles, const SearchOptions& options) {
  if (profiles.empty()) throw std::invalid_argument("[suggest] there are no profiles to search");
  if (options.checkpoints.empty()) throw std::invalid_argument("[suggest] give at least one checkpoint mode");
  if (options.memory_limit < 0 || !(options.bandwidth >= 0)) {
    throw std::invalid_argument(
        StrFormat("[suggest] memory_limit and bandwidth must not be negative, but are %d and %g", options.memory_limit,
                  options.bandwidth));
  }
  Suggestion suggestion;
  const Profile* of_leanest = nullptr;
  std::int64_t least = std::numeric_limits<std::int64_t>::max();
  Candidate leanest;
  for (const auto& [chunks, profile] : profiles) {
    for (const auto checkpoint : options.checkpoints) {
      auto candidate = Search(profile, {chunks, checkpoint, options.bandwidth}, options).best();
      if (largest(candidate.bytes) < least) {
        least = largest(candidate.bytes);
        leanest = candidate;
        of_leanest = &profile;
      }
      suggestion.candidates.push_back(std::move(candidate));
    }
  }
  std::stable_sort(
      suggestion.candidates.begin(), suggestion.candidates.end(),
      [](const Candidate& a, const Candidate& b) { return a.fits != b.fits ? a.fits : a.seconds < b.seconds; });
  if (!suggestion.candidates.front().fits) suggestion.reason = why_not(leanest, *of_leanest, options);
  return suggestion;
}

}  // namespace gpipe
