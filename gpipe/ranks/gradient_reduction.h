#pragma once

#include "gpipe/ranks/team.h"

namespace gpipe {

/// A part of a parameter's gradient: elements in the order of its memory.
struct GradientPiece {
  std::size_t parameter;
  std::int64_t begin;
  std::int64_t end;
};

/// Parameters of a stage whose gradients travel together. Their elements, one after the other, are cut into one share
/// per replica, which sums it.
using GradientBucket = std::vector<std::vector<GradientPiece>>;

/// Returns about how many bytes of parts and sums a replica receives at once to sum a stage's gradients of `gradients`
/// bytes. `largest` is the most of one parameter.
std::int64_t reduction_bytes(int replicas, std::int64_t gradients, std::int64_t largest);

/// Sums the gradients of this rank's stages over the replicas, on a thread of its own, while the rest of the backward
/// runs. Sums stages from last to first, and the buckets of each in order.
/// Each replica sums its share of a bucket, in the order of replicas, and sends the sum to the others. It takes their
/// sums of a bucket after it has sent its own of the next one. So the bits are always the same, and a rank sends
/// 2 (R - 1) / R times the bytes of its gradients. A gradient that no replica has stays undefined.
///
/// Serves one backward. Thread safety: send() on one thread at a time per stage. Invariant: all replicas sum the
/// buckets in the same order, so a wait for a sum always ends.
class GradientReduction {
 public:
  /// `parameters`: of each stage, those whose gradients are summed; the same on all replicas.
  GradientReduction(Team& team, std::vector<std::vector<at::Tensor>> parameters);
  /// Ends early unless all gradients have been sent. REQUIRES: then a rank has failed.
  ~GradientReduction();

  /// Sends the shares of a stage's gradients to the other replicas. Does not wait. The caller gives up its references.
  /// Errors: ConnectionError; std::invalid_argument for a sparse gradient.
  void send(int stage, Gradients gradients);

  /// Returns the sums, per stage, on the devices of the parameters. REQUIRES: send() has been called for each stage.
  /// Errors: the first error of any rank.
  std::vector<Gradients> take();

 private:
  struct OfStage {
    std::vector<at::Tensor> parameters;
    std::vector<GradientBucket> buckets;
    std::vector<Team::GradientWires> parts;  // per other replica: gradients that it sums, and those to sum here
    std::vector<Team::GradientWires> sums;
    Gradients gradients;  // each on the CPU, in its parameter's order
  };
  void run();
  void await_thread();
  void sum();
  void sum_share(OfStage& stage, std::size_t number);
  void take_sums(OfStage& stage, std::size_t number);
  void write(OfStage& stage, const std::vector<GradientPiece>& pieces, const Parcel& values);
  Parcel receive(const Team::GradientWires& wires);
  Outgoing to_message(const std::vector<at::Tensor>& pieces) const;

  Team& team_;
  const std::uint64_t call_;
  std::vector<OfStage> stages_;
  std::atomic<int>& awaited_;  // the rank that the thread waits for, or -1
  Mutex mutex_;
  CondVar changed_;
  std::vector<char> is_sent_ ABSL_GUARDED_BY(mutex_);  // per stage
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  bool done_ ABSL_GUARDED_BY(mutex_) = false;  // the thread
  std::exception_ptr error_;                   // of the thread
  std::thread thread_;
};

}  // namespace gpipe
