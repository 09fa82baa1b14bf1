#pragma once

#include "balance/predict.h"
#include "gpipe/api.h"

namespace gpipe {

/// A way to run a model, and its predicted cost.
struct Candidate : PredictedStep {
  int chunks = 1;
  Checkpoint checkpoint = Checkpoint::kExceptLast;
  std::string schedule = {};  ///< of step(); empty: forward() and its backward
  int replicas = 1;           ///< pipelines that share the mini-batch; `chunks`, `bytes` and `crossing` are of one
  bool fits = true;           ///< into the memory limit
};

/// A number of chunks, and the model's profile for micro-batches of that size.
struct ChunkedProfile {
  int chunks = 1;
  Profile profile;
};

struct SearchOptions {
  int stages = 2;  ///< of schedulings without a placement
  std::vector<Checkpoint> checkpoints = {Checkpoint::kNever, Checkpoint::kExceptLast, Checkpoint::kAlways};
  /// Most bytes per device; 0 for no limit.
  std::int64_t memory_limit = 0;
  /// Device names, one per worker; empty: a device per worker. Bytes of workers on one device add up, times do not.
  std::vector<std::string> devices = {};
  Network network = {};  ///< as in RunOptions
  bool copies = false;   ///< as in RunOptions
  /// The schedules to try. One with a placement has as many stages as that has.
  std::vector<Scheduling> schedulings = {{}};
  /// Most actions that are simulated to move cuts.
  std::int64_t most_actions = 1'000'000;
};

/// Ways to run a model.
struct GPIPE_API Candidates {
  std::vector<Candidate> candidates;  ///< those that fit come first, fastest first
  /// Why nothing fits: which device, how many bytes are missing, and what would fit. Empty if a candidate fits.
  std::string reason;

  bool fits() const { return !candidates.empty() && reason.empty(); }
  /// The first candidate. Errors: std::runtime_error with the reason if nothing fits.
  const Candidate& best() const;
};

/// The best candidate for each number of chunks, checkpoint mode and schedule.
struct GPIPE_API Suggestion : Candidates {
  std::vector<ChunkedProfile> profiles;  ///< one per number of chunks
  /// The whole mini-batch on one device, without a pipeline: the baseline for the candidates. On a CPU with all
  /// intra-op threads. Set by suggest(); empty if the model does not run that way, e.g. because memory runs out.
  std::optional<Candidate> unpartitioned;

  /// The profile that a candidate was predicted from. Errors: std::invalid_argument for another number of chunks.
  const Profile& profile_of(const Candidate& candidate) const;
};

/// Returns the schedules that fit `workers` workers, with one and, for enough layers, two stages on each, in loops and
/// in a V, where they fit. Of schedules with the same lists, the first rule's counts.
GPIPE_API std::vector<Scheduling> all_schedulings(int workers, int layers);

/// Searches for the fastest way to run a profiled model, with the simulator. For each number of chunks, checkpoint mode
/// and schedule it takes the balance whose slowest stage is fastest. Then, best candidates first, it moves cuts by one
/// layer as long as the step gets faster (or, if nothing fits, smaller), for a few seconds of simulations.
/// Deterministic. Errors: std::invalid_argument for invalid options, no profiles, or fewer layers than stages.
GPIPE_API Suggestion search(std::vector<ChunkedProfile> profiles, const SearchOptions& options = {});

/// Predicts one candidate. Errors: as predict(), and std::invalid_argument for another number of devices than workers.
GPIPE_API Candidate make_candidate(const Profile& profile, const std::vector<std::int64_t>& balance,
                                   const RunOptions& run, const SearchOptions& options);

/// Whether only `a` fits, both fit and `a` is faster, or neither fits and `a` needs fewer bytes on its fullest device.
GPIPE_API bool is_better(const Candidate& a, const Candidate& b, const SearchOptions& options = {});

}  // namespace gpipe
