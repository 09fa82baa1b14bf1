#include "gpipe/run/borrowed_values.h"

#include <ATen/ops/equal.h>
#include <ATen/ops/view_as_real.h>
#include <torch/csrc/autograd/variable.h>

#include <sstream>
#include <stdexcept>

namespace gpipe {
namespace {

// The elements as integers of their size, which are equal if all bits are.
at::Tensor as_bits(const at::Tensor& tensor) {
  const auto numbers = tensor.is_complex() ? at::view_as_real(tensor) : tensor;
  switch (numbers.element_size()) {
    case 1:
      return numbers.view(at::kByte);
    case 2:
      return numbers.view(at::kShort);
    case 4:
      return numbers.view(at::kInt);
    default:
      return numbers.view(at::kLong);
  }
}

void check_kind(const at::Tensor& value, const at::Tensor& copy) {
  if (value.scalar_type() == copy.scalar_type() && value.sizes() == copy.sizes()) return;
  std::ostringstream message;
  message << "[gpipe] a parameter that several stages share is " << value.scalar_type() << value.sizes()
          << " on the rank that owns it, but " << copy.scalar_type() << copy.sizes()
          << " on this rank; convert the model on all ranks";
  throw std::runtime_error(message.str());
}

void set_value(const at::Tensor& copy, const at::Tensor& value) {
  auto present = copy.variable_data();
  const auto next = value.to(copy.device());
  if (at::equal(as_bits(present), as_bits(next))) return;
  present.copy_(next);
  if (!copy.is_inference()) torch::autograd::impl::bump_version(copy);
}

}  // namespace

void BorrowedValues::receive(Parcel& lent, at::Tensor copy) {
  auto& value = lent.tensors.front();
  {
    MutexLock lock(mutex_);
    if (const auto found = received_.find(copy.unsafeGetTensorImpl()); found != received_.end()) {
      wait(found->second, copy.device());
    } else {
      check_kind(value, copy);
      set_value(copy, value);
      if (copy.requires_grad() != lent.wants_gradient.front()) copy.set_requires_grad(lent.wants_gradient.front());
      received_.emplace(copy.unsafeGetTensorImpl(), record_event(copy.device()));
    }
  }
  if (value.device() == copy.device()) value = copy.detach();
  lent.renew_versions();
}

}  // namespace gpipe
