#include "gpipe/autograd/stage_state.h"

#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <algorithm>
#include <exception>

#include "gpipe/autograd/stage.h"
#include "gpipe/base/checks.h"

namespace gpipe {
namespace {

thread_local StageState* watching = nullptr;

// Calls functions, and keeps the first error.
class FirstError {
 public:
  void catch_from(absl::FunctionRef<void()> call) {
    try {
      call();
    } catch (...) {
      if (!error_) error_ = std::current_exception();
    }
  }
  void rethrow() const {
    if (error_) std::rethrow_exception(error_);
  }

 private:
  std::exception_ptr error_;
};

// Disables Python dispatch modes for its lifetime: one of them may have thrown the error that is being handled.
class WithoutModes {
 public:
  WithoutModes() : modes_(ModeStack::get_state()) { ModeStack::set_state({}); }
  ~WithoutModes() { ModeStack::set_state(std::move(modes_)); }
  WithoutModes(const WithoutModes&) = delete;
  WithoutModes& operator=(const WithoutModes&) = delete;

 private:
  using ModeStack = c10::impl::TorchDispatchModeTLS;
  ModeStack modes_;
};

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

StateItem StageState::make_item(const at::Tensor& tensor, bool is_buffer) const {
  StateItem item{.tensor = tensor, .generator = {}, .is_buffer = is_buffer, .version = VersionWatch(tensor)};
  for (const auto& [buffer, what] : forbidden_) {
    if (buffer.is_same(tensor)) item.forbidden = what;
  }
  item.copied_early = is_buffer && is_strided(tensor) && !is_large(tensor) && item.forbidden.empty();
  if (tensor.has_storage()) item.alias = tensor.variable_data();
  return item;
}

// The first `buffers` of the tensors are buffers.
void StageState::track(std::vector<at::Tensor> tensors, std::size_t buffers) {
  if (are_same(tensors, *tensors_)) return;
  absl::flat_hash_map<const c10::TensorImpl*, StateItem> known;
  for (auto& item : items_) known.try_emplace(item.tensor.unsafeGetTensorImpl(), std::move(item));
  items_.clear();
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    auto found = known.extract(tensors[i].unsafeGetTensorImpl());
    items_.push_back(found.empty() ? make_item(tensors[i], i < buffers) : std::move(found.mapped()));
  }
  for (auto& [tensor, item] : known) {
    if (!item.now.expired()) items_.push_back(std::move(item));
  }
  renew_index();
  tensors_ = std::make_shared<const std::vector<at::Tensor>>(std::move(tensors));
}

void StageState::renew_index() {
  index_.clear();
  for (std::size_t i = 0; i < items_.size(); ++i) {
    auto& item = items_[i];
    item.memory = memory_of(item.tensor);
    index_[item.tensor.unsafeGetTensorImpl()].push_back(i);
    if (item.memory != nullptr) index_[item.memory].push_back(i);
  }
}

// Calls f(item) for the item of a tensor, and for each item whose tensor shares its memory.
template <typename F>
void StageState::for_each_of_memory(const at::Tensor& tensor, F f) {
  const auto* memory = memory_of(tensor);
  if (const auto found = index_.find(memory); found != index_.end()) {
    for (const auto i : found->second) f(items_[i]);
  }
  if (const auto found = index_.find(tensor.unsafeGetTensorImpl()); found != index_.end()) {
    for (const auto i : found->second) {
      if (memory == nullptr || items_[i].memory != memory) f(items_[i]);
    }
  }
}

StageState::Moment StageState::hold(const Stage& stage, const std::vector<at::Tensor>& parameters) {
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
  moment.tensors_ = tensors_;
  const auto has_moved = [](const StateItem& item) { return item.memory != memory_of(item.tensor); };
  if (std::ranges::any_of(items_, has_moved)) renew_index();
  for (std::size_t i = 0; i < tensors_->size(); ++i) {
    auto& item = items_[i];
    item.note_unseen();
    moment.values_.push_back(item.hold());
    if (item.copied_early) item.keep();
  }
  for (auto& item : generators_) moment.values_.push_back(item.hold());
  return moment;
}

StateItem* StageState::find(const at::Tensor& tensor, std::size_t guess) {
  if (guess < items_.size() && items_[guess].tensor.is_same(tensor)) return &items_[guess];
  const auto found = std::ranges::find_if(items_, [&](const auto& item) { return item.tensor.is_same(tensor); });
  return found == items_.end() ? nullptr : &*found;
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
  FirstError error;
  stage.locked([&] {
    for (const auto& buffers : moment.buffers_) {
      if (buffers.put_back) error.catch_from(buffers.put_back);
    }
  });
  error.rethrow();
}

void StageState::restore(const Stage& stage, const Moment& moment) {
  FirstError error;
  error.catch_from([&] { put_back(stage, moment); });
  error.catch_from([&] { restore_values(moment); });
  error.rethrow();
}

void StageState::restore_after_backward(const Stage& stage, const Moment& moment) {
  std::string owner;  // of a replaced buffer that had another value in the forward
  stage.locked([&] {
    for (std::size_t i = 0; i < stage.layers.size(); ++i) {
      const auto now = stage.layers[i]->buffers().tensors;
      if (are_same(now, moment.buffers_[i].tensors)) continue;
      for (const auto& tensor : moment.buffers_[i].tensors) {
        if (index_of(tensor, now) == now.size() && !has_value(tensor, moment)) owner = stage.layers[i]->name();
      }
    }
  });
  restore_values(moment);
  if (owner.empty()) return;
  throw_error("a backward replaced a buffer of layer '", owner,
              "' that its forwards write to; write to it in place in both, or use checkpoint='never'");
}

// Whether a tensor, one of the moment's, has the value that it had then.
bool StageState::has_value(const at::Tensor& tensor, const Moment& moment) {
  const auto i = index_of(tensor, *moment.tensors_);
  if (i == moment.tensors_->size()) return true;
  const auto* item = find(tensor, i);
  const auto& value = moment.values_[i];
  return item == nullptr || item->now.lock() == value || (value->copy.defined() && value->copy.equal(tensor));
}

void StageState::restore_values(const Moment& moment) {
  std::vector<std::pair<StateItem*, std::shared_ptr<StateValue>>> changed;
  const auto add = [&](StateItem& item, const std::shared_ptr<StateValue>& value) {
    if (item.now.lock() != value) changed.emplace_back(&item, value);
  };
  const auto& tensors = *moment.tensors_;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    auto* item = find(tensors[i], i);
    if (item == nullptr) continue;
    item->note_unseen();
    if (std::exchange(item->is_written_back, false)) continue;
    add(*item, moment.values_[i]);
  }
  for (std::size_t i = 0; i < generators_.size(); ++i) {
    const auto at = tensors.size() + i;
    add(generators_[i], at < moment.values_.size() ? moment.values_[at] : generators_[i].first);
  }
  // All present values first, because writing one tensor changes the others of its memory.
  for (const auto& each : changed) each.first->keep();
  FirstError error;
  for (const auto& each : changed) error.catch_from([&] { each.first->put(each.second); });
  error.rethrow();
}

void StageState::restore_after_error(const Stage& stage, const Moment& moment) noexcept {
  const WithoutModes without_modes;
  try {
    restore(stage, moment);
  } catch (...) {
  }
}

void StageState::check(const Stage& stage, bool needed) {
  for (auto& item : items_) {
    const bool is_changed = item.version.changed();
    const bool is_gone = item.note_unseen();
    if (item.copied_early) item.change();
    if (!is_changed) continue;
    if (!item.forbidden.empty()) refuse_write(item.forbidden);
    item.copied_early = true;
    if (!is_gone || !needed) continue;
    throw_error("a tensor of ", owner_of(item.tensor, stage),
                " was changed for the first time by code that PyTorch does not see, so its forward cannot be "
                "recomputed; repeat the call: from now on the stage stores copies of the tensor");
  }
}

void StageState::forbid_writes(const at::Tensor& buffer, std::string what) {
  forbidden_.emplace_back(buffer, std::move(what));
}

bool StageState::may_change(const at::Tensor& buffer) const {
  return std::ranges::none_of(items_, [&](const StateItem& item) {
    return item.tensor.is_same(buffer) && !item.copied_early && !item.has_changed;
  });
}

bool StageState::must_copy(const at::Tensor& leaving) {
  bool result = false;
  for_each_of_memory(leaving, [&](StateItem& item) {
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
void StageState::return_to_present(StateItem& item) {
  if (present_ == nullptr || item.is_written_back) return;
  const auto at = index_of(item.tensor, *present_->tensors_);
  if (at == present_->tensors_->size()) return;
  item.is_written_back = true;
  if (item.now.lock() == present_->values_[at]) return;
  item.keep();
  item.put(present_->values_[at]);  // calls before_write() again
}

bool StageState::before_write(const at::Tensor& tensor) {
  if (watching == nullptr || !tensor.defined()) return false;
  bool found = false;
  watching->for_each_of_memory(tensor, [&](StateItem& item) {
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
  watching->for_each_of_memory(tensor, [](StateItem& item) { item.version = VersionWatch(item.tensor); });
}

void StageState::before_draw(const at::Generator& generator) {
  if (watching == nullptr) return;
  auto& generators = watching->generators_;
  auto found = std::ranges::find(generators, generator, &StateItem::generator);
  if (found == generators.end()) {
    found = generators.insert(found, StateItem{.tensor = {}, .generator = generator});
    found->first = std::make_shared<StateValue>(StateValue{found->read()});
  }
  found->change();
}

}  // namespace gpipe
