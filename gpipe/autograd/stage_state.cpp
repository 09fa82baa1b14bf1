#include "gpipe/autograd/stage_state.h"

#include <algorithm>
#include <exception>
#include <mutex>

#include "absl/cleanup/cleanup.h"
#include "gpipe/autograd/stage.h"
#include "gpipe/base/checks.h"
#include "gpipe/tensors/torch_internals.h"
#include "gpipe/tensors/transfer.h"

namespace gpipe {
namespace {

thread_local StageState* watching = nullptr;

// Calls `call`. Keeps its exception in `error`, unless that has an earlier one.
void keep_first(std::exception_ptr& error, absl::FunctionRef<void()> call) {
  try {
    call();
  } catch (...) {
    if (!error) error = std::current_exception();
  }
}

// The tensor's memory, of a sparse one its values'; null if it has none of its own, as a wrapper has.
const void* memory_of(const at::Tensor& tensor) {
  if (tensor.is_sparse()) return memory_of(tensor._values());
  if (tensor.is_sparse_csr()) return memory_of(tensor.values());
  if (!tensor.has_storage() || tensor.unsafeGetTensorImpl()->is_python_dispatch()) return nullptr;
  return tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
}

bool is_strided(const at::Tensor& tensor) { return tensor.layout() == at::kStrided && !tensor.is_nested(); }

[[noreturn]] void refuse_write(const std::string& what) {
  throw_error("a layer wrote to ", what, ", which run concurrently; put the layers that share it into one stage");
}

// The name of the layer that has a tensor.
std::string owner_of(const at::Tensor& tensor, const Stage& stage) {
  for (const auto& layer : stage.layers) {
    const auto is_in = [&](const auto& tensors) { return index_of(tensor, tensors) < tensors.size(); };
    if (is_in(layer->buffers().tensors) || is_in(layer->module()->parameters())) return "layer '" + layer->name() + "'";
  }
  return "a layer";
}

}  // namespace

at::Tensor StageState::Item::read() const {
  if (tensor.defined()) return copy_of(tensor);
  auto source = generator;
  std::lock_guard<std::mutex> lock(source.mutex());
  return source.get_state();
}

void StageState::Item::write(const at::Tensor& value) const {
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

std::shared_ptr<StageState::Value> StageState::Item::hold() {
  auto value = now.lock();
  if (!value) now = value = std::make_shared<Value>();
  return value;
}

void StageState::Item::keep() const {
  if (const auto value = now.lock(); value && !value->copy.defined()) value->copy = read();
}

void StageState::Item::change() {
  has_changed = true;
  keep();
  now.reset();
}

bool StageState::Item::note_unseen() {
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

void StageState::Item::put(const std::shared_ptr<Value>& value) {
  if (!value->copy.defined()) {
    throw_error(
        "a buffer or frozen parameter was changed between a forward and its backward, so the forward cannot be "
        "recomputed; change it after the backward");
  }
  write(value->copy);
  now = value;
  if (alias.defined()) alias = tensor.variable_data();
}

std::shared_ptr<StageState::Item> StageState::make_item(const at::Tensor& tensor, bool is_buffer) const {
  Item item{.tensor = tensor, .generator = {}, .is_buffer = is_buffer, .version = VersionWatch(tensor)};
  for (const auto& [buffer, what] : forbidden_) {
    if (buffer.is_same(tensor)) item.forbidden = what;
  }
  item.copied_early = is_buffer && is_strided(tensor) && !is_large(tensor) && item.forbidden.empty();
  if (tensor.has_storage()) item.alias = tensor.variable_data();
  return std::make_shared<Item>(std::move(item));
}

// Makes items of the tensors, and an index of all items. The first `buffers` of the tensors are buffers.
void StageState::track(std::vector<at::Tensor> tensors, std::size_t buffers) {
  const auto has_moved = [](const auto& item) { return item->memory != memory_of(item->tensor); };
  if (are_same(tensors, tensors_) && std::ranges::none_of(items_, has_moved)) return;
  absl::flat_hash_map<const c10::TensorImpl*, std::shared_ptr<Item>> known;
  for (auto& item : items_) known.emplace(item->tensor.unsafeGetTensorImpl(), std::move(item));
  items_.clear();
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    auto found = known.extract(tensors[i].unsafeGetTensorImpl());
    items_.push_back(found.empty() ? make_item(tensors[i], i < buffers) : std::move(found.mapped()));
  }
  for (auto& [tensor, item] : known) {
    if (item.use_count() > 1) items_.push_back(std::move(item));
  }
  tensors_ = std::move(tensors);
  index_.clear();
  for (const auto& item : items_) {
    item->memory = memory_of(item->tensor);
    index_[item->tensor.unsafeGetTensorImpl()].push_back(item.get());
    if (item->memory != nullptr) index_[item->memory].push_back(item.get());
  }
}

// Calls f(item) for the item of a tensor, and for each item whose tensor shares its memory.
template <typename F>
void StageState::for_each_of_memory(const at::Tensor& tensor, F f) {
  const void* const memory = memory_of(tensor);
  for (const void* const key : {memory, static_cast<const void*>(tensor.unsafeGetTensorImpl())}) {
    const auto found = index_.find(key);
    if (found == index_.end()) continue;
    for (auto* item : found->second) {
      if (key == memory || memory == nullptr || item->memory != memory) f(*item);  // each once
    }
  }
}

StageState::Moment StageState::hold(const Stage& stage, const std::vector<at::Tensor>& parameters, bool earlier) {
  Moment moment;
  std::vector<at::Tensor> tensors;
  stage.locked([&] {
    for (const auto& layer : stage.layers) moment.buffers_.push_back(layer->buffers());
  });
  for (const auto& of_layer : moment.buffers_) {
    tensors.insert(tensors.end(), of_layer.tensors.begin(), of_layer.tensors.end());
  }
  tensors = distinct(std::move(tensors));
  const auto buffers = tensors.size();
  tensors.insert(tensors.end(), parameters.begin(), parameters.end());
  track(std::move(tensors), buffers);
  const auto count = earlier ? items_.size() : tensors_.size();
  moment.values_.reserve(count + generators_.size());
  for (std::size_t i = 0; i < count; ++i) {
    const auto& item = items_[i];
    item->note_unseen();
    moment.values_.emplace_back(item, item->hold());
    if (item->copied_early) item->keep();
  }
  for (const auto& item : generators_) moment.values_.emplace_back(item, item->hold());
  moment.generators_ = generators_.size();
  return moment;
}

bool StageState::has_new_modules(const Stage& stage, const Moment& moment) const {
  bool result = false;
  stage.locked([&] {
    for (std::size_t i = 0; i < stage.layers.size(); ++i) {
      result = result || stage.layers[i]->buffers().modules != moment.buffers_[i].modules;
    }
  });
  return result;
}

void StageState::put_back(const Stage& stage, const Moment& moment) {
  std::exception_ptr error;
  stage.locked([&] {
    for (const auto& buffers : moment.buffers_) {
      if (buffers.put_back) keep_first(error, buffers.put_back);
    }
  });
  if (error) std::rethrow_exception(error);
}

void StageState::restore(const Stage& stage, const Moment& moment) {
  std::exception_ptr error;
  keep_first(error, [&] { put_back(stage, moment); });
  keep_first(error, [&] { restore_values(moment); });
  if (error) std::rethrow_exception(error);
}

void StageState::restore_after_backward(const Stage& stage, const Moment& moment) {
  const auto has_changed = [&](const at::Tensor& buffer) {
    return std::ranges::any_of(moment.values_, [&](const auto& held) {
      const auto& [item, value] = held;  // of a generator, without a tensor
      if (!buffer.defined() || !item->tensor.is_same(buffer) || item->now.lock() == value) return false;
      return !value->copy.defined() || !value->copy.equal(buffer);
    });
  };
  std::string owner;  // of a replaced buffer that had another value in the forward
  stage.locked([&] {
    for (std::size_t i = 0; i < stage.layers.size(); ++i) {
      const auto now = stage.layers[i]->buffers().tensors;
      if (are_same(now, moment.buffers_[i].tensors)) continue;
      for (const auto& tensor : moment.buffers_[i].tensors) {
        if (index_of(tensor, now) == now.size() && has_changed(tensor)) owner = stage.layers[i]->name();
      }
    }
  });
  restore_values(moment);
  if (owner.empty()) return;
  throw_error("a backward replaced a buffer of layer '", owner,
              "' that its forwards write to; write to it in place in both, or use checkpoint='never'");
}

void StageState::restore_values(const Moment& moment) {
  std::vector<std::pair<Item*, std::shared_ptr<Value>>> changed;
  const auto add = [&](const std::shared_ptr<Item>& item, const std::shared_ptr<Value>& value) {
    if (item->now.lock() != value) changed.emplace_back(item.get(), value);
  };
  for (const auto& [item, value] : moment.values_) {
    item->note_unseen();
    if (!std::exchange(item->is_written_back, false)) add(item, value);
  }
  for (auto i = moment.generators_; i < generators_.size(); ++i) add(generators_[i], generators_[i]->first);
  // All present values first, because writing one tensor changes the others of its memory.
  for (const auto& each : changed) each.first->keep();
  std::exception_ptr error;
  for (const auto& each : changed) keep_first(error, [&] { each.first->put(each.second); });
  if (error) std::rethrow_exception(error);
}

void StageState::restore_after_error(const Stage& stage, const Moment& moment) noexcept {
  // Disables Python dispatch modes: one of them may have thrown the error that is being handled.
  using ModeStack = c10::impl::TorchDispatchModeTLS;
  const absl::Cleanup enable_modes = [modes = ModeStack::get_state()] { ModeStack::set_state(modes); };
  ModeStack::set_state({});
  std::exception_ptr ignored;
  keep_first(ignored, [&] { restore(stage, moment); });
}

void StageState::check(const Stage& stage, bool needed) {
  for (const auto& item : items_) {
    const bool is_changed = item->version.changed();
    const bool is_gone = item->note_unseen();
    if (item->copied_early) item->change();
    if (!is_changed) continue;
    if (!item->forbidden.empty()) refuse_write(item->forbidden);
    item->copied_early = true;
    if (!is_gone || !needed) continue;
    throw_error("a tensor of ", owner_of(item->tensor, stage),
                " was changed for the first time by code that PyTorch does not see, so its forward cannot be "
                "recomputed; repeat the call: from now on the stage stores copies of the tensor");
  }
}

bool StageState::may_change(const at::Tensor& buffer) const {
  return std::ranges::none_of(items_, [&](const auto& item) {
    return item->tensor.is_same(buffer) && !item->copied_early && !item->has_changed;
  });
}

bool StageState::must_copy(const at::Tensor& leaving) {
  bool result = false;
  for_each_of_memory(leaving, [&](Item& item) {
    if (item.is_buffer || item.has_changed) result = true;
    item.has_left = true;
  });
  return result;
}

StageState::Scope::Scope(StageState& state, const Moment* present)
    : state_(state), outer_(std::exchange(watching, &state)) {
  state_.present_ = present;
}

StageState::Scope::~Scope() {
  watching = outer_;
  state_.present_ = nullptr;
}

// Call before a backward writes to a tensor. Replaces the forward's value by the present one.
void StageState::return_to_present(Item& item) {
  if (present_ == nullptr || item.is_written_back) return;
  for (const auto& [held, value] : present_->values_) {
    if (held.get() != &item) continue;
    item.is_written_back = true;
    if (item.now.lock() == value) return;
    item.keep();
    item.put(value);  // calls before_write() again
    return;
  }
}

bool StageState::before_write(const at::Tensor& tensor) {
  if (watching == nullptr || !tensor.defined()) return false;
  bool found = false;
  watching->for_each_of_memory(tensor, [&](Item& item) {
    if (!item.forbidden.empty()) refuse_write(item.forbidden);
    const bool is_first = !item.has_changed;
    watching->return_to_present(item);
    item.change();
    if (is_first && item.has_left && !item.is_buffer) {
      throw_error(
          "a layer wrote to a parameter for the first time, and a tensor of the same memory has left the stage; repeat "
          "the call: from now on such tensors leave as copies");
    }
    found = true;
  });
  return found;
}

void StageState::after_write(const at::Tensor& tensor) {
  if (watching == nullptr) return;
  watching->for_each_of_memory(tensor, [](Item& item) { item.version = VersionWatch(item.tensor); });
}

void StageState::before_draw(const at::Generator& generator) {
  if (watching == nullptr) return;
  auto& generators = watching->generators_;
  for (const auto& item : generators) {
    if (item->generator == generator) return item->change();
  }
  auto& item = *generators.emplace_back(std::make_shared<Item>(Item{.tensor = {}, .generator = generator}));
  item.first = item.hold();
  item.change();
}

}  // namespace gpipe
