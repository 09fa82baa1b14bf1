#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include "absl/container/flat_hash_map.h"
#include "gpipe/autograd/layer.h"
#include "gpipe/tensors/parcel.h"

namespace gpipe {

struct Stage;

/// What a stage's layers read besides their inputs and may change: buffers, parameters, and generators of their own.
/// Gives a recompute the values that its forward read, and undoes a failed call.
///
/// Copies on write: while a Moment is held, an operator that writes to a tensor first copies it. Compiled code writes
/// unseen: so buffers below 64 KiB, and tensors once changed unseen, are copied when held.
///
/// Used by one thread at a time: the stage's worker, or a caller that holds the pipeline's turn.
class StageState {
  /// One value of a tensor or generator. The copy is defined if the value may be gone.
  struct Value {
    at::Tensor copy;
  };
  /// A tensor or generator whose values a StageState keeps: copies a value before it changes, if a Moment needs it.
  struct Item {
    at::Tensor tensor;
    at::Generator generator;  // instead of a tensor
    bool is_buffer = false;
    std::string forbidden = {};  // the name of a buffer that no layer may write to
    bool copied_early = false;
    bool has_changed = false;
    bool has_left = false;                   // a tensor of this memory has left the stage without a copy
    bool is_written_back = false;            // a backward has written to the present value
    const void* memory = nullptr;            // under which the index has it
    at::Tensor alias = {};                   // keeps the memory if a layer assigns to Tensor.data
    VersionWatch version;                    // of the tensor, as last seen
    std::weak_ptr<Value> now = {};           // of the Moments that hold the present value
    std::shared_ptr<Value> first = nullptr;  // of a generator: before its first draw

    at::Tensor read() const;
    void write(const at::Tensor& value) const;
    /// The present value, for a Moment.
    std::shared_ptr<Value> hold();
    /// Copies the present value if a Moment needs it.
    void keep() const;
    /// Call before the value changes.
    void change();
    /// Notes a change without change(). Returns whether a Moment needs a value that is gone.
    bool note_unseen();
    /// Gives it an earlier value. Does not advance the version counter. Errors: std::runtime_error if that is gone.
    void put(const std::shared_ptr<Value>& value);
  };

 public:
  /// The state at one time.
  class Moment {
    friend StageState;
    std::vector<Layer::Buffers> buffers_;                                           // per layer
    std::vector<std::pair<std::shared_ptr<Item>, std::shared_ptr<Value>>> values_;  // of tensors, then of generators
    std::size_t generators_ = 0;                                                    // their number
  };
  /// `parameters`: the stage's own. With `earlier`, also holds what earlier Moments hold.
  Moment hold(const Stage& stage, const std::vector<at::Tensor>& parameters, bool earlier = false);

  /// Whether layers have made modules since.
  bool has_new_modules(const Stage& stage, const Moment& moment) const;

  /// Makes the state what it was. Does not advance version counters, so graphs in flight stay valid.
  /// Errors: std::runtime_error for a value that was overwritten unseen; Layer::Buffers::put_back().
  void restore(const Stage& stage, const Moment& moment);
  /// Gives modules the buffers and modes that they had; values stay as they are. Errors: Layer::Buffers::put_back().
  void put_back(const Stage& stage, const Moment& moment);
  /// Restores the values, but not the buffers that the backward has set. Errors: std::runtime_error as restore(), and,
  /// with the name of the layer, if the backward replaced a buffer whose present value it could not read.
  void restore_after_backward(const Stage& stage, const Moment& moment);
  /// As restore(), while an exception is being handled: ignores its own errors.
  void restore_after_error(const Stage& stage, const Moment& moment) noexcept;

  /// Call after the layers have run. Finds what was written unseen. Errors, with `needed`: std::runtime_error, which
  /// names the layer, if a Moment needs a value that is gone. From then on the tensor is copied when it is held.
  void check(const Stage& stage, bool needed);

  /// Makes writes to a buffer an error: several stages, which run concurrently, have it. `what` names it.
  void forbid_writes(const at::Tensor& buffer, std::string what) { forbidden_.emplace_back(buffer, std::move(what)); }

  /// Whether a buffer is small, or was changed before.
  bool may_change(const at::Tensor& buffer) const;

  /// Whether a tensor that leaves the stage must be copied, because it shares memory with a buffer, or with a parameter
  /// that layers write to. Otherwise later writes to a parameter of the same memory are errors.
  bool must_copy(const at::Tensor& leaving);

  /// For its lifetime, operators on this thread, inside a RandomScope, tell `state` what they change. In the backward
  /// of a recomputed forward, a write changes the value of the Moment `present`, which restore() then leaves alone.
  class Scope {
   public:
    explicit Scope(StageState& state, const Moment* present = nullptr);
    ~Scope();
    Scope(const Scope&) = delete;

   private:
    StageState& state_;
    StageState* const outer_;
  };

  /// Tells this thread's state that a tensor is about to change. Returns whether the state has a tensor of its memory.
  /// Errors: std::runtime_error for a forbidden write.
  static bool before_write(const at::Tensor& tensor);
  /// Call when the tensor has changed, if its version counter may have advanced.
  static void after_write(const at::Tensor& tensor);
  /// Tells this thread's state that numbers are about to be drawn.
  static void before_draw(const at::Generator& generator);

 private:
  void track(std::vector<at::Tensor> tensors, std::size_t buffers);
  std::shared_ptr<Item> make_item(const at::Tensor& tensor, bool is_buffer) const;
  void restore_values(const Moment& moment);
  void return_to_present(Item& item);
  template <typename F>
  void for_each_of_memory(const at::Tensor& tensor, F f);

  std::vector<at::Tensor> tensors_;                             // of the layers, at the last hold()
  std::vector<std::shared_ptr<Item>> items_;                    // of tensors_, then of earlier ones that a Moment has
  absl::flat_hash_map<const void*, std::vector<Item*>> index_;  // of items_, by tensor and by its memory
  std::vector<std::shared_ptr<Item>> generators_;
  std::vector<std::pair<at::Tensor, std::string>> forbidden_;
  const Moment* present_ = nullptr;  // of the Scope
};

}  // namespace gpipe
