#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "gpipe/autograd/weak_tensors.h"

namespace gpipe {

class Layer;
struct Stage;

/// The values of tensors at one time.
class SavedTensors {
 public:
  explicit SavedTensors(std::vector<at::Tensor> tensors);
  /// Writes the values back. Does not change version counters, so graphs in flight stay valid.
  void restore() const;
  /// The same while an exception is under way. Ignores errors of its own.
  void restore_after_error() const noexcept;

 private:
  std::vector<at::Tensor> tensors_;
  std::vector<at::Tensor> copies_;
};

/// Which large buffers of a stage its forwards change. Masks and tables of positions stay constant, and recomputed cells
/// need no copies of them. Used by one thread at a time.
class BufferHabits {
 public:
  /// Whether a buffer is known to be constant and still has the version that it had then.
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

/// The buffers of layers as they were at one time: which tensors they were, and what those held.
class SavedBuffers {
 public:
  /// Copies every buffer; with `habits`, only those that are not known to be constant. The stage must outlive this.
  explicit SavedBuffers(const Stage& stage, const BufferHabits* habits = nullptr);

  /// Learns from the stage's forward that has run since which large buffers are constant, and drops their copies.
  /// Errors: std::runtime_error when a constant buffer has changed.
  void learn(BufferHabits& habits);

  /// Puts tensors and values back, as SavedTensors does. Errors: those of Layer::set_buffers().
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
