#include "gpipe/autograd/saved_buffers.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/equal.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <stdexcept>
#include <utility>

#include "gpipe/autograd/layer.h"
#include "gpipe/autograd/parcel.h"
#include "gpipe/autograd/stage.h"

namespace gpipe {
namespace {

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

void write_back(const at::Tensor& tensor, const at::Tensor& copy) {
  if (tensor.sizes() == copy.sizes()) {
    tensor.variable_data().copy_(copy);
  } else {
    tensor.set_data(copy.clone());  // its shape has changed
  }
}

}  // namespace

SavedTensors::SavedTensors(std::vector<at::Tensor> tensors) : tensors_(std::move(tensors)) {
  at::NoGradGuard no_grad;
  for (const auto& tensor : tensors_) copies_.push_back(tensor.clone());
}

void SavedTensors::restore() const {
  at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < tensors_.size(); ++i) write_back(tensors_[i], copies_[i]);
}

void SavedTensors::restore_after_error() const noexcept {
  const WithoutModes without_modes;
  try {
    restore();
  } catch (...) {
  }
}

bool BufferHabits::is_constant(const at::Tensor& buffer) const {
  const auto* habit = known_.find(buffer);
  return habit != nullptr && !habit->changes && habit->version == version_of(buffer);
}

bool BufferHabits::is_changing(const at::Tensor& buffer) const {
  const auto* habit = known_.find(buffer);
  return habit != nullptr && habit->changes;
}

void BufferHabits::note(const at::Tensor& buffer, bool changes) {
  known_.insert(buffer, {changes, version_of(buffer)});
}

SavedBuffers::SavedBuffers(const Stage& stage, const BufferHabits* habits) : stage_(stage) {
  stage.locked([&] {
    for (const auto& layer : stage.layers) {
      auto buffers = layer->buffers();
      if (!buffers.empty()) saved_.push_back({layer.get(), std::move(buffers), {}});
    }
  });
  at::NoGradGuard no_grad;
  for (auto& [layer, buffers, copies] : saved_) {
    for (const auto& buffer : buffers) {
      const bool copied = buffer.defined() && (habits == nullptr || !habits->is_constant(buffer));
      copies.push_back(copied ? buffer.clone() : at::Tensor());
    }
  }
}

void SavedBuffers::learn(BufferHabits& habits) {
  for (auto& [layer, buffers, copies] : saved_) {
    for (std::size_t i = 0; i < buffers.size(); ++i) {
      const auto& buffer = buffers[i];
      if (!buffer.defined() || !is_large(buffer) || habits.is_constant(buffer) || habits.is_changing(buffer)) continue;
      const bool copied = copies[i].defined();
      const bool changes = !copied || !at::equal(buffer, copies[i]);
      habits.note(buffer, changes);
      if (!changes) copies[i].reset();
      if (copied) continue;
      throw std::runtime_error("[gpipe] layer '" + layer->name() +
                               "' changed a buffer for the first time, so its forward cannot be recomputed; repeat "
                               "the call: from now on the stage stores a copy of the buffer");
    }
  }
}

void SavedBuffers::restore() const {
  stage_.locked([&] {
    for (const auto& [layer, buffers, copies] : saved_) layer->set_buffers(buffers);
  });
  at::NoGradGuard no_grad;
  for (const auto& [layer, buffers, copies] : saved_) {
    for (std::size_t i = 0; i < buffers.size(); ++i) {
      if (copies[i].defined()) write_back(buffers[i], copies[i]);
    }
  }
}

void SavedBuffers::restore_after_error() const noexcept {
  const WithoutModes without_modes;
  try {
    restore();
  } catch (...) {
  }
}

}  // namespace gpipe
