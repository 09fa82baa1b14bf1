#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "balance/predict.h"
#include "balance/profile.h"

namespace gpipe {

/// A way to run a model, and what it is predicted to cost.
struct Candidate {
  std::vector<std::int64_t> balance;
  int chunks = 1;
  Checkpoint checkpoint = Checkpoint::kExceptLast;
  double seconds = 0;  ///< of a step: forward and backward of the mini-batch
  double bubble = 0;
  std::vector<std::int64_t> bytes;  ///< per stage
  bool fits = true;                 ///< within the limit
};

/// A model at one number of chunks: its profile for micro-batches of that size.
struct ChunkedProfile {
  int chunks = 1;
  Profile profile;
};

struct SearchOptions {
  int stages = 2;
  std::vector<Checkpoint> checkpoints = {Checkpoint::kNever, Checkpoint::kExceptLast, Checkpoint::kAlways};
  /// Most bytes on one device; 0 for no limit.
  std::int64_t memory_limit = 0;
  /// The device of each stage, by any names; empty: one each. Stages on one device are still taken to run at once.
  std::vector<std::string> devices = {};
  /// Bytes a second between devices; 0: at once.
  double bandwidth = 0;
  /// As in RunOptions.
  bool copies = false;
};

struct Suggestion {
  std::vector<ChunkedProfile> profiles;  ///< what was searched
  /// The fastest that fits comes first, then the others that fit, and those that do not: one for each number of chunks
  /// and checkpoint mode.
  std::vector<Candidate> candidates;
  /// Why nothing fits: which device, how many bytes are missing, what would make it fit. Empty when something does.
  std::string reason;

  bool fits() const { return !candidates.empty() && reason.empty(); }
  /// The first candidate. Errors: std::runtime_error with the reason when nothing fits.
  const Candidate& best() const;
  /// The profile that one of the candidates was made from. Errors: std::invalid_argument for another's.
  const Profile& profile_of(const Candidate& candidate) const;
};

/// The fastest way to run a profiled model, by the simulator: of each number of chunks and checkpoint mode the balance
/// whose slowest stage is fastest, and from there moved, a layer at a time, as long as the step gets shorter (or, where
/// none fits, smaller). Errors: std::invalid_argument for options that
/// make no sense, no profiles, and fewer layers than stages.
Suggestion search(std::vector<ChunkedProfile> profiles, const SearchOptions& options = {});

/// A balance as a candidate. Errors: those of predict(), and std::invalid_argument for devices of another number of
/// stages.
Candidate make_candidate(const Profile& profile, const std::vector<std::int64_t>& balance, const RunOptions& run,
                         const SearchOptions& options);

/// Whether one is to be preferred: it fits and the other does not, or else it is faster.
bool is_better(const Candidate& a, const Candidate& b);

}  // namespace gpipe
