#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <memory>
#include <string>

#include "gpipe/tensors/version_watch.h"

namespace gpipe {

/// One value of a tensor or generator. The copy is defined if the value may be gone.
struct StateValue {
  at::Tensor copy;
};
/// A tensor or generator whose values a StageState keeps: copies a value before it changes, if a Moment needs it. Used by one
/// thread at a time.
struct StateItem {
  at::Tensor tensor;
  at::Generator generator;  // instead of a tensor
  bool is_buffer = false;
  std::string forbidden = {};  // the name of a buffer that no layer may write to
  bool copied_early = false;
  bool has_changed = false;
  bool has_left = false;                        // a tensor of this memory has left the stage without a copy
  bool is_written_back = false;                 // a backward has written to the present value
  const void* memory = nullptr;                 // under which the index has it
  at::Tensor alias = {};                        // keeps the memory if a layer assigns to Tensor.data
  VersionWatch version;                         // of the tensor, as last seen
  std::weak_ptr<StateValue> now = {};           // of the Moments that hold the present value
  std::shared_ptr<StateValue> first = nullptr;  // of a generator: before its first draw

  at::Tensor read() const;
  /// The present value, for a Moment.
  std::shared_ptr<StateValue> hold();
  /// Copies the present value if a Moment needs it.
  void keep() const;
  /// Call before the value changes.
  void change();
  /// Notes a change without change(). Returns whether a Moment needs a value that is gone.
  bool note_unseen();
  /// Gives it an earlier value. Does not advance the version counter. Errors: std::runtime_error if that is gone.
  void put(const std::shared_ptr<StateValue>& value);

 private:
  void write(const at::Tensor& value) const;
};

/// The tensor's memory, of a sparse one its values'; null if it has none of its own, as a wrapper has.
const void* memory_of(const at::Tensor& tensor);

bool is_strided(const at::Tensor& tensor);

}  // namespace gpipe
