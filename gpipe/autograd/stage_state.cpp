#include "gpipe/autograd/stage_state.h"

#include <algorithm>

#include "absl/cleanup/cleanup.h"
#include "gpipe/autograd/stage.h"
#include "gpipe/base/checks.h"
#include "gpipe/tensors/torch_internals.h"
#include "gpipe/tensors/transfer.h"

namespace gpipe {
namespace {

thread_local StageState* current = nullptr;

bool is_strided(const at::Tensor& tensor) { return tensor.layout() == at::kStrided && !tensor.is_nested(); }

using Memory = c10::weak_intrusive_ptr<c10::StorageImpl>;

// A tensor's memory, of a sparse one its values'; null if it has none of its own, as a wrapper has.
Memory memory_of(const at::Tensor& tensor) {
  if (tensor.is_sparse()) return memory_of(tensor._values());
  if (tensor.is_sparse_csr()) return memory_of(tensor.values());
  const bool has_own = tensor.has_storage() && !tensor.unsafeGetTensorImpl()->is_python_dispatch();
  return has_own ? tensor.storage().getWeakStorageImpl() : Memory(c10::intrusive_ptr<c10::StorageImpl>());
}

void set_value(const at::Tensor& tensor, const at::Tensor& value) {
  use_on_current_stream(value);
  const bool fits = !is_strided(tensor) || (tensor.sizes() == value.sizes() && tensor.strides() == value.strides());
  fits ? overwrite(tensor, value) : tensor.set_data(copy_of(value));
}

// Finds what belongs to a tensor, in a list.
template <typename List, typename Member>
auto find(const at::Tensor& tensor, List& list, Member member) {
  const auto is_it = [&](const at::Tensor& each) { return each.is_same(tensor); };
  return std::ranges::find_if(list, is_it, member);
}

auto value_of(const at::Tensor& tensor, StageState::Saved& saved) {
  return find(tensor, saved.values, [](const auto& value) -> const at::Tensor& { return value.first; });
}

std::string owner_of(const at::Tensor& tensor, const Stage& stage) {
  std::string owner = "a layer";
  stage.locked([&] {
    for (const auto& layer : stage.layers) {
      const auto has = [&](const auto& tensors) { return index_of(tensor, tensors) < tensors.size(); };
      if (has(layer->buffers().tensors) || has(layer->parameters())) owner = "layer '" + layer->name() + "'";
    }
  });
  return owner;
}

[[noreturn]] void refuse_write(const std::string& what) {
  throw_error("a layer wrote to ", what, ", which run concurrently; put the layers that share it into one stage");
}

}  // namespace

StageState::Saved StageState::save(const Stage& stage, const std::vector<at::Tensor>& parameters) {
  Saved saved;
  std::vector<at::Tensor> tensors;
  stage.locked([&] {
    for (const auto& layer : stage.layers) saved.layers.push_back(layer->buffers());
  });
  for (const auto& of : saved.layers) tensors.insert(tensors.end(), of.tensors.begin(), of.tensors.end());
  tensors = distinct(std::move(tensors));
  const auto buffers = tensors.size();
  tensors.insert(tensors.end(), parameters.begin(), parameters.end());
  find_change(/*by_layers=*/false);
  if (!std::ranges::equal(tensors, items_, &at::Tensor::is_same, {}, &Item::tensor)) {
    auto known = std::exchange(items_, {});
    const bool is_first = known.empty();  // else a layer may have made a new buffer
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const auto& tensor = tensors[i];
      if (const auto found = find(tensor, known, &Item::tensor); found != known.end()) {
        items_.push_back(std::move(*found));
        continue;
      }
      const auto shared = find(tensor, shared_, [](const auto& each) -> const at::Tensor& { return each.first; });
      const auto what = shared == shared_.end() ? "" : shared->second;
      const bool is_copied = i < buffers && is_strided(tensor) && what.empty() && (!is_first || !is_large(tensor));
      items_.push_back({tensor, i < buffers, is_copied, what, VersionWatch(tensor), memory_of(tensor), !is_first});
    }
  }
  saved.changes = changes_;
  for (const auto& item : items_) {
    if (item.is_copied) saved.values.emplace_back(item.tensor, copy_of(item.tensor));
  }
  return saved;
}

// Returns a tensor that has changed since the last time and is not copied, if any.
const StageState::Item* StageState::find_change(bool by_layers) {
  const Item* found = nullptr;
  for (auto& item : items_) {
    auto memory = memory_of(item.tensor);  // another one if a layer has assigned to Tensor.data
    if (!item.version.changed() && memory == item.memory) continue;
    if (by_layers && !item.shared_by.empty()) refuse_write(item.shared_by);
    item.memory = std::move(memory);
    item.version = VersionWatch(item.tensor);
    item.has_changed = true;
    if (item.is_copied) continue;
    item.is_copied = by_layers && item.is_buffer;
    ++changes_;
    changed_ = item.tensor;
    found = &item;
  }
  return found;
}

void StageState::rebind(const Stage& stage, const Saved& saved) {
  stage.locked([&] {
    for (const auto& buffers : saved.layers) {
      if (buffers.put_back) buffers.put_back();
    }
  });
}

void StageState::restore(const Stage& stage, const Saved& saved) {
  for (const auto& [tensor, value] : saved.values) set_value(tensor, value);
  rebind(stage, saved);
}

void StageState::restore_after_error(const Stage& stage, const Saved& saved) noexcept try {
  // Disables Python dispatch modes: one of them may have thrown the error that is being handled.
  using ModeStack = c10::impl::TorchDispatchModeTLS;
  const absl::Cleanup enable_modes = [modes = ModeStack::get_state()] { ModeStack::set_state(modes); };
  ModeStack::set_state({});
  restore(stage, saved);
} catch (...) {
}

void StageState::restore_forward(const Stage& stage, const Saved& forward, Saved& now) {
  if (forward.changes != changes_) {
    throw_error("a parameter or large buffer of ", owner_of(changed_, stage),
                " was changed between a forward and its recompute; if a layer wrote to the buffer, repeat the call: "
                "from now on it is copied; else change it after the backward, or use checkpoint='never'");
  }
  for (const auto& [tensor, value] : forward.values) {
    if (value_of(tensor, now) == now.values.end()) now.values.emplace_back(tensor, copy_of(tensor));
  }
  restore(stage, forward);
}

void StageState::restore_after_backward(const Stage& stage, const Saved& now) {
  for (const auto& [tensor, value] : now.values) set_value(tensor, value);
  stage.locked([&] {
    for (std::size_t i = 0; i < stage.layers.size(); ++i) {
      if (are_same(stage.layers[i]->buffers().tensors, now.layers[i].tensors)) continue;
      throw_error("a backward replaced a buffer of layer '", stage.layers[i]->name(),
                  "', whose forward was recomputed; write to it in place, or use checkpoint='never'");
    }
  });
}

void StageState::check(const Stage& stage) {
  const auto* item = find_change(/*by_layers=*/true);
  if (item == nullptr || !is_recomputed()) return;
  throw_error("a ", item->is_buffer ? "large buffer" : "parameter", " of ", owner_of(item->tensor, stage),
              " was changed by code that PyTorch does not see, in a forward that is recomputed; ",
              item->is_buffer
                  ? "set the buffer's value again, which is lost, and repeat the call: from now on it is copied"
                  : "use checkpoint='never'");
}

bool StageState::may_change(const at::Tensor& buffer) const {
  const auto found = find(buffer, items_, &Item::tensor);
  return found == items_.end() || found->is_copied || found->has_changed;
}

bool StageState::has_memory_of(const at::Tensor& tensor) const {
  return std::ranges::any_of(items_, [&, memory = memory_of(tensor)](const Item& item) {
    return item.tensor.is_same(tensor) || (memory._unsafe_get_target() != nullptr && item.memory == memory);
  });
}

StageState::Scope::Scope(StageState& state, Saved* saved, bool is_backward) : outer_(std::exchange(current, &state)) {
  state.saved_ = saved;
  state.is_backward_ = is_backward;
}

StageState::Scope::~Scope() {
  current->saved_ = nullptr;
  current = outer_;
}

void StageState::before_write(const at::Tensor& tensor) {
  if (current == nullptr || !tensor.defined()) return;
  const auto memory = memory_of(tensor);
  const bool has_memory = memory._unsafe_get_target() != nullptr;
  for (auto& item : current->items_) {
    if (item.tensor.is_same(tensor) || (has_memory && item.memory == memory)) current->before_change(item);
  }
}

void StageState::before_change(Item& item) {
  if (!item.shared_by.empty()) refuse_write(item.shared_by);
  if (!item.is_buffer && is_recomputed()) {
    throw_error(
        "a layer wrote to a parameter in a forward that is recomputed; use checkpoint='never', or make it a "
        "buffer");
  }
  item.has_changed = true;
  if (!item.is_copied) {
    item.is_copied = item.is_buffer;
    ++changes_;
    changed_ = item.tensor;
    for (auto* saved : {call, is_backward_ ? nullptr : saved_}) {
      if (saved == nullptr || value_of(item.tensor, *saved) != saved->values.end()) continue;
      saved->values.emplace_back(item.tensor, copy_of(item.tensor));
      saved->changes = changes_;
    }
  } else if (is_backward_ && saved_ != nullptr) {
    const auto found = value_of(item.tensor, *saved_);
    if (found == saved_->values.end()) return;
    const auto [present, value] = std::move(*found);
    saved_->values.erase(found);
    set_value(present, value);  // which calls this again
  }
}

}  // namespace gpipe
