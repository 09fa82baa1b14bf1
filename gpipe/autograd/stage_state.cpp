#include "gpipe/autograd/stage_state.h"

#include <algorithm>

#include "absl/cleanup/cleanup.h"
#include "gpipe/autograd/stage.h"
#include "gpipe/base/checks.h"
#include "gpipe/tensors/torch_internals.h"

namespace gpipe {
namespace {

thread_local StageState::Scope* current = nullptr;

bool runs(StageState::Pass pass) { return current != nullptr && current->pass == pass; }

// Finds what belongs to a tensor, in a list.
template <typename List>
auto find(const at::Tensor& tensor, List& list) {
  return std::ranges::find_if(list, [&](const auto& each) { return each.tensor.is_same(tensor); });
}

// Copies the tensors that have no copy yet.
void add_copies(std::vector<at::Tensor> tensors, StageState::Saved& saved) {
  std::erase_if(tensors, [&](const auto& tensor) { return find(tensor, saved.copies) != saved.copies.end(); });
  for (auto& copy : copies_of(tensors)) saved.copies.push_back(std::move(copy));
}

[[noreturn]] void refuse_write(const std::string& what) {
  throw_error("a layer wrote to ", what, ", which run concurrently; put the layers that share it into one stage");
}

void put_back(const Stage& stage, const StageState::Saved& saved) {
  overwrite(saved.copies);
  StageState::put_back_modules(stage, saved);
}

}  // namespace

bool is_checkpointing() { return runs(StageState::Pass::kCheckpointing); }

bool is_recomputing() { return runs(StageState::Pass::kRecomputing); }

bool is_recomputed() { return is_checkpointing() || is_recomputing(); }

// A tensor's memory, of a sparse one its values'; null if it has none of its own, as a wrapper has.
StageState::Memory StageState::memory_of(const at::Tensor& tensor) {
  if (tensor.is_sparse()) return memory_of(tensor._values());
  if (tensor.is_sparse_csr()) return memory_of(tensor.values());
  const bool has_own = tensor.has_storage() && !tensor.unsafeGetTensorImpl()->is_python_dispatch();
  return has_own ? tensor.storage().getWeakStorageImpl() : Memory(c10::intrusive_ptr<c10::StorageImpl>());
}

bool StageState::Item::has(const at::Tensor& other, const Memory& its_memory) const {
  return tensor.is_same(other) || (its_memory._unsafe_get_target() != nullptr && memory == its_memory);
}

StageState::Saved StageState::save(const Stage& stage, const std::vector<at::Tensor>& parameters) {
  Saved saved;
  stage.locked([&] {
    for (const auto& layer : stage.layers) saved.layers.push_back(layer->buffers());
  });
  std::vector<at::Tensor> tensors;
  for (const auto& item : items_) {
    if (!item.shared_by.empty()) tensors.push_back(item.tensor);  // a layer may get it back, or have a view
  }
  for (const auto& of : saved.layers) tensors.insert(tensors.end(), of.tensors.begin(), of.tensors.end());
  tensors = distinct(std::move(tensors));
  const auto buffers = tensors.size();
  tensors.insert(tensors.end(), parameters.begin(), parameters.end());
  find_change(/*by_layers=*/false);
  const bool is_first = !std::exchange(has_saved_, true);  // else a layer may have made a new buffer
  if (!std::ranges::equal(tensors, items_, &at::Tensor::is_same, {}, &Item::tensor)) {
    auto known = std::exchange(items_, {});
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const auto& tensor = tensors[i];
      if (const auto found = find(tensor, known); found != known.end()) {
        items_.push_back(std::move(*found));
        continue;
      }
      const bool is_strided = tensor.layout() == at::kStrided && !tensor.is_nested();
      const bool is_copied = i < buffers && is_strided && (!is_first || !is_large(tensor));
      items_.push_back({tensor, i < buffers, is_copied, "", VersionWatch(tensor), memory_of(tensor)});
    }
  }
  saved.changes = changes_;
  std::vector<at::Tensor> copied;
  for (const auto& item : items_) {
    if (item.is_copied) copied.push_back(item.tensor);
  }
  saved.copies = copies_of(copied);
  return saved;
}

void StageState::put_back_modules(const Stage& stage, const Saved& saved) {
  stage.locked([&] {
    for (const auto& buffers : saved.layers) {
      if (buffers.put_back) buffers.put_back();
    }
  });
}

void StageState::restore_after_error(const Stage& stage, const Saved& saved) noexcept try {
  // Disables Python dispatch modes: one of them may have thrown the error that is being handled.
  using ModeStack = c10::impl::TorchDispatchModeTLS;
  const absl::Cleanup enable_modes = [modes = ModeStack::get_state()] { ModeStack::set_state(modes); };
  ModeStack::set_state({});
  put_back(stage, saved);
} catch (...) {
}

void StageState::begin_recompute(const Stage& stage, const Saved& forward, Saved& now) {
  if (forward.changes != changes_) {
    throw_error("a parameter or large buffer of ", stage.owner_of(changed_),
                " was changed between a forward and its recompute; if a layer wrote to the buffer, repeat the call: "
                "from now on it is copied; else change it after the backward, or use checkpoint='never'");
  }
  std::vector<at::Tensor> copied;
  for (const auto& copy : forward.copies) copied.push_back(copy.tensor);
  add_copies(std::move(copied), now);
  put_back(stage, forward);
}

void StageState::end_backward(const Stage& stage, const Saved& now) {
  overwrite(now.copies);
  stage.locked([&] {
    for (std::size_t i = 0; i < stage.layers.size(); ++i) {
      if (are_same(stage.layers[i]->buffers().tensors, now.layers[i].tensors)) continue;
      throw_error("a backward replaced a buffer of layer '", stage.layers[i]->name(),
                  "', whose forward was recomputed; write to it in place, or use checkpoint='never'");
    }
  });
}

// REQUIRES: the tensor is not copied.
void StageState::note_change(Item& item, bool by_layers) {
  item.is_copied = by_layers && item.is_buffer;
  ++changes_;
  changed_ = item.tensor;
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
    if (item.is_copied) continue;
    note_change(item, by_layers);
    found = &item;
  }
  return found;
}

void StageState::check(const Stage& stage) {
  const auto* item = find_change(/*by_layers=*/true);
  if (item == nullptr || !is_recomputed()) return;
  throw_error("a ", item->is_buffer ? "large buffer" : "parameter", " of ", stage.owner_of(item->tensor),
              " was changed by code that PyTorch does not see, in a forward that is recomputed; ",
              item->is_buffer
                  ? "set the buffer's value again, which is lost, and repeat the call: from now on it is copied"
                  : "use checkpoint='never'");
}

void StageState::forbid_writes(const at::Tensor& buffer, std::string what) {
  items_.push_back({buffer, true, false, std::move(what), VersionWatch(buffer), memory_of(buffer)});
}

bool StageState::may_change(const at::Tensor& buffer) const {
  const auto found = find(buffer, items_);
  return found == items_.end() || found->is_copied;
}

bool StageState::has_memory_of(const at::Tensor& tensor) const {
  const auto memory = memory_of(tensor);
  return std::ranges::any_of(items_, [&](const Item& item) { return item.has(tensor, memory); });
}

StageState::Scope::Scope(StageState& of, Pass runs, std::optional<Saved>& its)
    : state(of), pass(runs), saved(its ? &*its : nullptr), outer_(std::exchange(current, this)) {}

StageState::Scope::~Scope() { current = outer_; }

void StageState::before_write(const at::Tensor& tensor) {
  if (current == nullptr || !tensor.defined()) return;
  const auto memory = memory_of(tensor);
  for (auto& item : current->state.items_) {
    if (item.has(tensor, memory)) current->state.before_change(item, current->saved);
  }
}

void StageState::before_change(Item& item, Saved* saved) {
  if (!item.shared_by.empty()) refuse_write(item.shared_by);
  if (!item.is_buffer && has_replicas) {
    throw_error("a layer wrote to a parameter, so the replicas would have different values; make it a buffer");
  }
  if (!item.is_buffer && is_recomputed()) {
    throw_error(
        "a layer wrote to a parameter in a forward that is recomputed; use checkpoint='never', or make it a buffer");
  }
  if (!item.is_copied) {
    note_change(item, /*by_layers=*/true);
    for (auto* each : {call, is_recomputed() ? saved : nullptr}) {
      if (each == nullptr) continue;
      add_copies({item.tensor}, *each);
      each->changes = changes_;
    }
  } else if (saved != nullptr && !is_recomputed()) {
    const auto found = find(item.tensor, saved->copies);
    if (found == saved->copies.end()) return;
    const auto [present, value] = std::move(*found);
    saved->copies.erase(found);
    overwrite(present, value);  // which calls this again
  }
}

}  // namespace gpipe
