#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace torch {
class Library;
}

namespace gpipe {

struct Stage;

/// Adds the kernels of batch norm, which collects statistics, and of instance norm, which refuses to.
void register_batch_norm(torch::Library& library);

/// Collects the batch norm statistics of a stage over a whole mini-batch, so that running statistics are updated once
/// per mini-batch (deferred batch norm, torchgpipe, Kim et al., arXiv:2004.09910). Used by one thread at a time.
///
/// Merges means and sums of squared deviations in double (Chan, Golub, LeVeque: Updating Formulae and a Pairwise
/// Algorithm for Computing Sample Variances, 1979).
class BatchStatistics {
 public:
  /// One micro-batch: for its lifetime, batch norm in training mode on this thread, inside a RandomScope, adds its input
  /// to `statistics` and leaves its running statistics alone. Instance norm with running statistics throws
  /// std::runtime_error. nullptr changes nothing.
  class Scope {
   public:
    explicit Scope(BatchStatistics* statistics);
    ~Scope();
    Scope(const Scope&) = delete;

   private:
    BatchStatistics* const previous_;
  };

  /// Adds the input of one call. The n-th calls of all micro-batches make one update. An empty input only counts as a
  /// call. REQUIRES: batch norm accepts `input`.
  void add(const at::Tensor& input, const at::Tensor& running_mean, const at::Tensor& running_var, double momentum);

  /// Returns the statistics as tensors on the CPU, three for each update: numbers (the indices of the running mean and
  /// variance in `buffers`, the momentum, the number of values per channel); the mean; the deviations.
  std::vector<at::Tensor> to_tensors(const std::vector<at::Tensor>& buffers) const;

  /// Takes instead the merged to_tensors() of several objects, in order, for equal `buffers`. Keeps its own calls.
  void join(const std::vector<at::Tensor>& buffers, const std::vector<std::vector<at::Tensor>>& of_others);

  /// Updates the running statistics and counts of the stage's layers, as one batch norm over the mini-batch does, with
  /// the first micro-batch's momentum; not for fewer than two values per channel.
  void commit(const Stage& stage);

 private:
  struct Entry {
    at::Tensor running_mean;
    at::Tensor running_var;
    double momentum = 0;
    std::int64_t calls = 0;
    bool is_next = false;        // whether the micro-batch has not made this call yet
    double count = 0;            // values per channel
    at::Tensor mean = {};        // per channel, double
    at::Tensor deviations = {};  // per channel, double: sum of squared deviations
  };
  void begin_micro_batch();
  /// Returns the entry of the micro-batch's next call.
  Entry& next_entry(const at::Tensor& running_mean, const at::Tensor& running_var, double momentum);
  static void merge(Entry& entry, double count, const at::Tensor& mean, const at::Tensor& deviations);

  std::vector<Entry> entries_;  // a batch norm's entries are in the order of its calls
};

}  // namespace gpipe
