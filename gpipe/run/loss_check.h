#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstddef>
#include <limits>
#include <mutex>
#include <optional>
#include <set>
#include <typeinfo>
#include <vector>

#include "gpipe/loss_function.h"
#include "gpipe/tensors/parcel.h"

namespace gpipe {

/// What a loss may weight or ignore samples by: numbers in a tensor of a target.
struct TargetMarks {
  /// Whether the micro-batches have unequal shares of zeros, of negative numbers, of NaN; and unequal means.
  std::array<bool, 4> uneven{};
  bool is_integer = false;
  float low = std::numeric_limits<float>::infinity();
  float high = -std::numeric_limits<float>::infinity();
  /// Integers that were the most frequent ones, with an eighth of a mini-batch.
  std::set<float> frequent;

  /// Adds the marks of a later mini-batch. Returns whether any is new.
  bool add(const TargetMarks& later);
};

/// Thread safety: under its mutex.
struct LossRecord {
  std::mutex mutex;
  const std::type_info* count = nullptr;  ///< the type of the count that weighted it; null if nothing was compared
  std::vector<TargetMarks> marks;         ///< per tensor of the targets
};

/// Compares the loss of a mini-batch with those of its micro-batches, for StepOptions::check.
///
/// Thread safety: as StepLoss.
class LossComparison {
 public:
  /// `targets`: per micro-batch, before the forwards. Returns std::nullopt if a comparison would tell nothing new.
  static std::optional<LossComparison> begin(const LossFunction& function, const CountFunction& count,
                                             const std::vector<Parcel>& targets);

  /// Returns whether all micro-batches have come.
  bool add(int micro_batch, const Value& output, Parcel target);
  /// Compares, once. `losses` and `weights`: per micro-batch. Puts back the state of the loss. Errors:
  /// std::invalid_argument if the losses or their gradients differ.
  void run(const std::vector<at::Tensor>& losses, const std::vector<double>& weights);
  /// Adds this to the function's record.
  void note();

 private:
  LossComparison(const LossFunction& function, const std::type_info& count, std::vector<TargetMarks> marks,
                 std::size_t micro_batches);

  LossFunction function_;           // a copy, which may have a state
  const std::type_info* count_;     // of the record after the comparison
  std::vector<TargetMarks> marks_;  // of the record after the comparison
  std::size_t left_;                // micro-batches that have not come
  std::vector<Parcel> outputs_;
  std::vector<Parcel> targets_;
};

}  // namespace gpipe
