#pragma once

#include <optional>

#include "balance/predict.h"

namespace gpipe {

/// A way to train a model, and its predicted cost.
struct Plan : PredictedStep {
  int chunks = 1;
  Checkpoints checkpoint = {};  ///< of each stage, or of all
  std::string schedule = {};    ///< of step()
  int replicas = 1;             ///< pipelines that share the mini-batch; `chunks`, `bytes` and `crossing` are of one
  std::int64_t missing = 0;     ///< bytes on the device that lacks most
  double measured = 0;          ///< seconds of a step that ran; 0 if none did

  bool fits() const { return missing == 0; }
};

/// What is given. The rest is chosen.
struct PlanOptions {
  std::int64_t samples = 1;  ///< of the mini-batch
  /// Names of the devices, one per worker, in all replicas. Bytes of workers on one device add up, times do not.
  std::vector<std::string> devices = {};
  /// The most bytes of each device, or of all if there is one number; empty: no limit.
  std::vector<std::int64_t> memory = {};
  int replicas = 1;      ///< of worker w on devices w * replicas and following; 0: any number that divides the devices
  Network network = {};  ///< its `replicas` are not used
  bool copies = false;   ///< as in RunOptions
  /// Numbers of micro-batches to try, those for whose size there is a profile. Empty: as many as a profile's samples make.
  std::vector<int> chunks = {};
  std::vector<std::int64_t> balance = {};
  std::optional<Checkpoints> checkpoint = {};
  int stages = 0;  ///< 0: any number; segments do not count
  /// To try. Without a placement: in any that fits. Empty: all_schedulings().
  std::vector<Scheduling> schedulings = {};
  /// Most actions that are simulated to improve plans.
  std::int64_t most_actions = 2'000'000;
};

/// The best plans of each number of micro-batches, schedule, placement and number of replicas.
struct GPIPE_API Plans {
  std::vector<Plan> plans;  ///< those that fit come first, fastest first
  /// The whole mini-batch on one device, without a pipeline. On a CPU with all intra-op threads. Set by plan() of a
  /// model; empty if the model does not run that way, e.g. because memory runs out.
  std::optional<Plan> unpartitioned = {};
  std::string reason = {};       ///< why nothing fits: which device, how many bytes are missing, what would fit
  double least_seconds = 0;      ///< no plan that the options allow is predicted to be faster
  double more_memory_saves = 0;  ///< predicted seconds of the first plan's step, with 5 % more memory on each device

  bool fits() const { return !plans.empty() && reason.empty(); }
  /// The first plan. Errors: std::runtime_error with the reason if nothing fits.
  const Plan& best() const;
};

/// Returns the schedules that fit `workers` workers, with one and, for enough layers, two stages on each, in loops and
/// in a V, where they fit. Of schedules with the same lists, the first rule's counts.
GPIPE_API std::vector<Scheduling> all_schedulings(int workers, int layers);

/// Plans the training of a model from profiles of it, each for micro-batches of another size. Chooses the schedule, the
/// placement, the number of micro-batches, the cut, which layers are recomputed (see segments.h), and, if wanted, the
/// number of replicas: what the simulator says is fastest within the memory.
///
/// For each schedule and number of micro-batches, dynamic programming cuts the model by estimates. The simulator then
/// tells the bytes of each device, and a search for the least price of memory meets its limit. Then a search changes cuts
/// and segments one at a time. It starts from the best plans found so far, and ends when this has not helped a few times.
/// What is left of the limit is used up by recomputing fewer micro-batches. Deterministic. Takes seconds for a thousand
/// devices.
///
/// Of plans that differ by less than 3 %, the first recomputes least. Schedules that fill and drain come after all others
/// that fit, because they add gradients in another order: so a training has the same bits whichever plan is chosen.
///
/// Errors: std::invalid_argument for invalid options, no profiles, profiles of different models, or if nothing can be
/// tried.
GPIPE_API Plans plan(const std::vector<Profile>& profiles, const PlanOptions& options);

}  // namespace gpipe
