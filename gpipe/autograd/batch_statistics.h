#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace gpipe {

struct Stage;

/// The statistics of whole mini-batches for batch norm, whose running statistics would otherwise be updated once a
/// micro-batch, each time with a part's (the deferred batch norm of torchgpipe, Kim et al., arXiv:2004.09910).
///
/// Micro-batches normalise themselves as ever. Their means and sums of squared deviations are joined in double
/// (Chan, Golub, LeVeque: Updating Formulae and a Pairwise Algorithm for Computing Sample Variances, 1979), so that
/// many micro-batches, or a mean far from zero, cost no digits.
///
/// For one stage and one mini-batch; used by one thread at a time.
class BatchStatistics {
 public:
  /// While it lives, batch norm in training mode on this thread, inside a RandomScope, adds what enters to `statistics`
  /// and leaves its running statistics alone. nullptr: changes nothing.
  class Scope {
   public:
    explicit Scope(BatchStatistics* statistics);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    BatchStatistics* const previous_;
  };
  static BatchStatistics* current();

  /// REQUIRES: what batch norm requires of its input. An input without values counts as a call only.
  void add(const at::Tensor& input, const at::Tensor& running_mean, const at::Tensor& running_var, double momentum);

  /// Updates the running statistics and counts of the stage's layers as one batch norm of the whole mini-batch does.
  /// The momentum is the first micro-batch's, which is right also where it depends on the count. Statistics stay where
  /// the mini-batch had fewer than two values a channel: those have no variance.
  void commit(const Stage& stage);

 private:
  struct Entry {
    at::Tensor running_mean;
    at::Tensor running_var;
    double momentum = 0;
    std::int64_t calls = 0;
    double count = 0;            // values a channel
    at::Tensor mean = {};        // by channel, double
    at::Tensor deviations = {};  // squared and summed, by channel, double
  };
  std::vector<Entry> entries_;
};

}  // namespace gpipe
