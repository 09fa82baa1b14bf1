#include <mutex>

#include "gpipe/autograd/stage_state.h"
#include "gpipe/base/checks.h"
#include "gpipe/tensors/transfer.h"

namespace gpipe {

const void* memory_of(const at::Tensor& tensor) {
  if (tensor.is_sparse()) return memory_of(tensor._values());
  if (tensor.is_sparse_csr()) return memory_of(tensor.values());
  if (!tensor.has_storage() || tensor.unsafeGetTensorImpl()->is_python_dispatch()) return nullptr;
  return tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
}

bool is_strided(const at::Tensor& tensor) { return tensor.layout() == at::kStrided && !tensor.is_nested(); }

at::Tensor StateItem::read() const {
  if (tensor.defined()) return copy_of(tensor);
  auto source = generator;
  std::lock_guard<std::mutex> lock(source.mutex());
  return source.get_state();
}

void StateItem::write(const at::Tensor& value) const {
  if (!tensor.defined()) {
    auto target = generator;
    std::lock_guard<std::mutex> lock(target.mutex());
    return target.set_state(value);
  }
  use_on_current_stream(value);
  // Whether a layer has assigned to Tensor.data or resized the tensor.
  const bool is_other = is_strided(tensor) && (memory_of(tensor) != memory_of(alias) ||
                                               tensor.sizes() != value.sizes() || tensor.strides() != value.strides());
  is_other ? tensor.set_data(copy_of(value)) : overwrite(tensor, value);
}

std::shared_ptr<StateValue> StateItem::hold() {
  auto value = now.lock();
  if (!value) now = value = std::make_shared<StateValue>();
  return value;
}

void StateItem::keep() const {
  if (const auto value = now.lock(); value && !value->copy.defined()) value->copy = read();
}

void StateItem::change() {
  has_changed = true;
  keep();
  now.reset();
}

bool StateItem::note_unseen() {
  const bool has_moved = alias.defined() && memory_of(alias) != memory_of(tensor);
  if (!version.changed() && !has_moved) return false;
  const auto value = now.lock();
  const bool is_needed = value && !value->copy.defined();
  if (is_needed && has_moved) value->copy = alias;
  if (has_moved) alias = tensor.variable_data();
  has_changed = true;
  version = VersionWatch(tensor);
  now.reset();
  return is_needed && !has_moved;
}

void StateItem::put(const std::shared_ptr<StateValue>& value) {
  if (!value->copy.defined()) {
    throw_error(
        "a buffer or frozen parameter was changed between a forward and its backward, so the forward cannot be "
        "recomputed; change it after the backward");
  }
  write(value->copy);
  now = value;
  if (alias.defined()) alias = tensor.variable_data();
}

}  // namespace gpipe
