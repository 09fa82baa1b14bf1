#include "gpipe/shared_buffers.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/equal.h>

#include <stdexcept>
#include <utility>

#include "gpipe/autograd/parcel.h"

namespace gpipe {

void SharedBuffers::add(const at::Tensor& buffer, std::string what) { shared_.push_back({buffer, std::move(what)}); }

void SharedBuffers::before_forward(bool grad) {
  at::NoGradGuard no_grad;
  for (auto& shared : shared_) {
    shared.version = version_of(shared.buffer);
    if (grad && !watched_) shared.copy = shared.buffer.clone();
  }
}

void SharedBuffers::after_forward() {
  for (auto& [buffer, what, version, copy] : shared_) {
    const bool changed = version_of(buffer) != version || (copy.defined() && !at::equal(buffer, copy));
    watched_ = watched_ || copy.defined();
    copy.reset();
    if (!changed) continue;
    watched_ = false;
    throw std::runtime_error("[gpipe] a layer wrote to " + what +
                             ", which run concurrently; put the layers that share it into one stage");
  }
}

}  // namespace gpipe
