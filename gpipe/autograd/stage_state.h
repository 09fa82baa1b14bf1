#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "gpipe/autograd/layer.h"
#include "gpipe/tensors/parcel.h"
#include "gpipe/tensors/transfer.h"

namespace gpipe {

struct Stage;

/// Whether is_checkpointing() or is_recomputing() holds.
bool is_recomputed();

/// What a stage's layers may change besides their outputs. Copies buffers that are small or that layers write to, and
/// refuses other changes between a forward and its recompute. Used by one thread at a time: the stage's worker, or a
/// caller that holds the pipeline's turn.
///
/// For example, a batch norm counts num_batches_tracked in F and again in R. R starts with F's count, and after its B the
/// buffer has the present count again.
class StageState {
 public:
  struct Saved {
    std::vector<Layer::Buffers> layers;
    std::vector<TensorCopy> copies;
    int changes = 0;  ///< of tensors without a copy, before that time
  };
  /// `parameters`: the stage's own.
  Saved save(const Stage& stage, const std::vector<at::Tensor>& parameters);
  /// Gives modules the buffers and modes that they had. Errors: as Layer::Buffers::put_back().
  static void put_back_modules(const Stage& stage, const Saved& saved);
  /// Gives them the values too, while an exception is being handled: ignores its own errors. Does not advance version
  /// counters, so graphs in flight stay valid.
  static void restore_after_error(const Stage& stage, const Saved& saved) noexcept;
  /// Does the same before the layers run again. Adds to `now`, just saved, what will undo this. Errors:
  /// std::runtime_error, which names the layer, if a tensor without a copy has changed; as put_back_modules().
  void begin_recompute(const Stage& stage, const Saved& forward, Saved& now);
  /// Call after the recompute's backward: puts back the present values. Errors: std::runtime_error, which names the
  /// layer, if the backward replaced a buffer.
  static void end_backward(const Stage& stage, const Saved& now);

  /// Call after the layers have run. Errors: std::runtime_error, which names the layer, if code that PyTorch does not see
  /// has changed a tensor without a copy, in a forward that is recomputed.
  void check(const Stage& stage);
  /// Makes writes to a buffer an error: several stages, which run concurrently, have it. `what` names it.
  void forbid_writes(const at::Tensor& buffer, std::string what);
  /// Whether a buffer is copied, because it is small or layers have written to it. True for one that no save() has seen.
  bool may_change(const at::Tensor& buffer) const;
  /// Whether a tensor shares memory with one of the layers, so that it must be copied when it leaves the stage.
  bool has_memory_of(const at::Tensor& tensor) const;

  /// Makes writes to parameters an error: the other replicas would not have the value.
  bool has_replicas = false;
  /// The running call's Saved, which undoes it; null between calls. Gets copies of large buffers before the first write.
  Saved* call = nullptr;

  /// What is_checkpointing() and is_recomputing() return; in kPlain neither is true, and writes to buffers stay.
  enum class Pass { kPlain, kCheckpointing, kRecomputing };
  /// For its lifetime, this thread runs a pass of the stage, and operators inside a RandomScope tell `state` what they
  /// write to. Before the first write to a buffer, `saved`, which may be empty, gets a copy of a large one; in kPlain,
  /// which is the loss or backward of a recompute, the buffer gets its value of `saved`, the present one. Scopes nest.
  class Scope {
   public:
    Scope(StageState& state, Pass pass, std::optional<Saved>& saved);
    ~Scope();
    Scope(const Scope&) = delete;

    StageState& state;
    const Pass pass;
    Saved* const saved;

   private:
    Scope* const outer_;
  };
  /// Errors: std::runtime_error for a write to a shared buffer, or to a parameter in a forward that is recomputed or has
  /// replicas.
  static void before_write(const at::Tensor& tensor);

 private:
  using Memory = c10::weak_intrusive_ptr<c10::StorageImpl>;  // weak, so that no other memory gets its address
  struct Item {
    bool has(const at::Tensor& other, const Memory& its_memory) const;

    at::Tensor tensor;
    bool is_buffer;
    bool is_copied;         // by save()
    std::string shared_by;  // of forbid_writes()
    VersionWatch version;   // as last seen
    Memory memory;
  };
  static Memory memory_of(const at::Tensor& tensor);
  void note_change(Item& item, bool by_layers);
  const Item* find_change(bool by_layers);
  void before_change(Item& item, Saved* saved);

  std::vector<Item> items_;  // of the layers' tensors, and all shared buffers
  bool has_saved_ = false;
  int changes_ = 0;
  at::Tensor changed_;  // the last one
};

}  // namespace gpipe
