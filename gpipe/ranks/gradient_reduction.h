#pragma once

#include "gpipe/ranks/team.h"

namespace gpipe {

/// Returns about how many bytes a replica needs beside a stage's gradients, of `gradients` bytes, to sum them. `largest`
/// is the most of one parameter.
std::int64_t reduction_bytes(int replicas, std::int64_t gradients, std::int64_t largest);

/// Sums the gradients of this rank's stages over the replicas by c10d's all-reduce, from the last stage to the first, in
/// buckets that depend on the parameters only. So all replicas start the same sums in the same order. A gradient that
/// no replica has stays undefined.
///
/// Serves one backward. Thread safety: send() on one thread at a time per stage.
class GradientReduction {
 public:
  /// `parameters`: of each stage, those whose gradients are summed; the same on all replicas.
  GradientReduction(Team& team, std::vector<std::vector<at::Tensor>> parameters);

  /// Takes a stage's gradients, and starts their sums, unless later stages have not sent. With wires between devices,
  /// take() starts them, when this rank's transfers are over: a device that runs one transfer at a time could deadlock.
  /// The caller gives up its references. Errors: std::invalid_argument for a sparse gradient.
  void send(int stage, Gradients gradients);

  /// Returns the sums, per stage, on the devices of the parameters. REQUIRES: send() has been called for each stage.
  /// Errors: the first error of any rank.
  std::vector<Gradients> take();

 private:
  struct Bucket {
    std::vector<std::size_t> parameters = {};
    std::int64_t elements = 0;  // before a flag per parameter: how many replicas have a gradient
    at::Tensor values = {};
    bool lacks_some = false;  // gradients, of this replica
    StreamEvent ready = nullptr;
    c10::intrusive_ptr<c10d::Work> sum = nullptr;
  };

  void start() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  Team& team_;
  const std::vector<std::vector<at::Tensor>> parameters_;  // per stage
  std::vector<std::vector<Bucket>> buckets_;               // per stage
  Mutex mutex_;
  std::vector<char> is_sent_ ABSL_GUARDED_BY(mutex_);  // per stage
};

}  // namespace gpipe
