#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "gpipe/autograd/weak_tensors.h"

namespace gpipe {

class Layer;
struct Stage;

/// Copies of tensors' values at one time.
class SavedTensors {
 public:
  explicit SavedTensors(std::vector<at::Tensor> tensors);
  /// Writes the values back. Does not advance version counters, so graphs in flight stay valid.
  void restore() const;
  /// As restore(), while an exception is being handled: ignores its own errors.
  void restore_after_error() const noexcept;

 private:
  std::vector<at::Tensor> tensors_;
  std::vector<at::Tensor> copies_;
};

/// Remembers which large buffers of a stage its forwards change. Others (masks, tables of positions) need no copies for
/// a recompute. Used by one thread at a time.
class BufferHabits {
 public:
  /// Whether a buffer is known to be constant and has not been changed since.
  bool is_constant(const at::Tensor& buffer) const;
  /// Whether forwards are known to change a buffer.
  bool is_changing(const at::Tensor& buffer) const;
  void note(const at::Tensor& buffer, bool changes);

 private:
  struct Habit {
    bool changes;
    std::uint32_t version;
  };
  WeakTensorMap<Habit> known_;
};

/// The buffers of a stage's layers at one time: which tensors they were, and their values.
class SavedBuffers {
 public:
  /// Copies every buffer; with `habits`, except those known to be constant. `stage` must outlive this.
  explicit SavedBuffers(const Stage& stage, const BufferHabits* habits = nullptr);

  /// Call after the stage's forward. Learns which large buffers are constant, and drops their copies. Errors:
  /// std::runtime_error when a buffer known to be constant has changed.
  void learn(BufferHabits& habits);

  /// Restores tensors and values, as SavedTensors does. Errors: those of Layer::set_buffers().
  void restore() const;
  void restore_after_error() const noexcept;

 private:
  struct OfLayer {
    Layer* layer;
    std::vector<at::Tensor> buffers;
    std::vector<at::Tensor> copies;  ///< undefined for constant buffers
  };

  const Stage& stage_;
  std::vector<OfLayer> saved_;
};

}  // namespace gpipe
