#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "gpipe/base/mutex.h"
#include "gpipe/ranks/gradient_buckets.h"
#include "gpipe/ranks/rank_team.h"
#include "gpipe/tensors/parcel.h"

namespace gpipe {

/// Sums the gradients of this rank's stages over the replicas, while the rest of the backward runs: on a thread of its own,
/// because Gloo's transfers cannot be polled. Sums stages from last to first, and the buckets of each in order.
/// Each replica sums its share of a bucket, in the order of replicas, and sends the sum to the others. It takes their sums
/// of a bucket after it has sent its own of the next one. So the bits are the same on all replicas and in all runs, and a
/// rank sends 2 (R - 1) / R times the bytes of its gradients. A gradient that no replica has stays undefined.
///
/// Serves one backward. Thread safety: send() on one thread at a time per stage.
/// Invariant: all replicas sum the buckets in the same order, so a wait for a sum always ends.
class GradientReduction {
 public:
  /// `parameters`: of each stage, those whose gradients are summed; the same on all replicas. A stage without any may be
  /// another rank's.
  GradientReduction(RankTeam& team, std::vector<std::vector<at::Tensor>> parameters);
  /// Ends early unless all gradients have been sent. REQUIRES: then a rank has failed.
  ~GradientReduction();
  GradientReduction(const GradientReduction&) = delete;
  GradientReduction& operator=(const GradientReduction&) = delete;

  /// Sends the shares of a stage's gradients to the other replicas. Does not wait. The caller gives up its references.
  /// Errors: ConnectionError; std::invalid_argument for a sparse gradient.
  void send(int stage, Gradients gradients);

  /// Returns the sums, per stage, on the devices of the parameters. REQUIRES: send() has been called for each stage.
  /// Errors: the first error of any rank; std::runtime_error if a `.grad` has changed since this was made.
  std::vector<Gradients> take();

 private:
  /// The ends of a stage's wires to another replica.
  struct Wires {
    WireSender* send_part;
    WireSender* send_sum;
    WireReceiver* receive_part;
    WireReceiver* receive_sum;
    std::deque<LastLayout>* sent_parts;
    std::deque<LastLayout>* sent_sums;
  };
  struct OfStage {
    std::vector<at::Tensor> parameters;
    std::vector<std::pair<at::Tensor, VersionWatch>> present;  // each parameter's `.grad`, with its version
    std::vector<GradientBucket> buckets;
    std::vector<Wires> wires;  // per replica; unused for this one
    Gradients gradients;       // as in_parameters_order()
  };
  void check_untouched() const;
  void run();
  void sum();
  bool await_stage(int stage);
  /// A bucket whose share this replica has summed.
  struct Summed {
    int stage = 0;
    const GradientBucket* bucket = nullptr;
  };
  void sum_share(int stage, const GradientBucket& bucket, std::size_t number);
  void take_sums(const Summed& summed);
  void await_deliveries();
  void write(OfStage& stage, const std::vector<GradientPiece>& pieces, const Parcel& values);
  Parcel receive(WireReceiver& wire, int replica);
  at::Tensor& gradient_of(OfStage& stage, std::size_t parameter);

  RankTeam& team_;
  const std::uint64_t call_;
  std::vector<OfStage> stages_;
  int other_ = -1;  // the rank that the thread waits for
  Mutex mutex_;
  CondVar changed_;
  std::vector<char> is_sent_ ABSL_GUARDED_BY(mutex_);  // per stage
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  std::exception_ptr error_;  // of the thread
  std::thread thread_;
};

}  // namespace gpipe
