#include "gpipe/tensors/transfer.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <map>

#include "gpipe/tensors/parcel.h"
#include "gpipe/tensors/torch_internals.h"

namespace gpipe {
namespace {

constexpr std::size_t kAlignment = 64;  // of memory from PyTorch's CPU allocator

c10::impl::VirtualGuardImpl guard_of(c10::Device device) { return c10::impl::VirtualGuardImpl(device.type()); }

StreamEvent record(c10::EventFlag flag, c10::Device device) {
  auto event = std::make_shared<c10::Event>(device.type(), flag);
  event->record(guard_of(device).getStream(device));
  return event;
}

}  // namespace

StreamEvent record_event(c10::Device device) {
  return device.is_cpu() ? nullptr : record(c10::EventFlag::PYTORCH_DEFAULT, device);
}

StreamEvent record_timed_event(c10::Device device) { return record(c10::EventFlag::BACKEND_DEFAULT, device); }

void wait(const StreamEvent& event, c10::Device device) {
  if (!event) return;
  device.is_cpu() ? event->synchronize() : event->block(guard_of(device).getStream(device));
}

StreamEvents record_events(std::span<const at::Tensor> tensors, c10::Device device) {
  StreamEvents events;
  std::vector<c10::Device> known;
  const auto record = [&](c10::Device on) {
    if (on.is_cpu() || std::ranges::find(known, on) != known.end()) return;
    known.push_back(on);
    events.push_back(record_event(on));
  };
  record(device);
  for (const auto& tensor : tensors) {
    if (tensor.defined()) record(tensor.device());
  }
  return events;
}

void wait(const StreamEvents& events, c10::Device device) {
  for (const auto& event : events) wait(event, device);
}

void use_on_current_stream(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.is_cpu()) return;
  if (tensor.is_sparse()) {
    use_on_current_stream(tensor._indices());
    return use_on_current_stream(tensor._values());
  }
  if (!tensor.has_storage()) return;
  const auto guard = guard_of(tensor.device());
  guard.recordDataPtrOnStream(tensor.storage().data_ptr(), guard.getStream(tensor.device()));
}

std::optional<c10::Stream> new_stream(c10::Device device) {
  if (device.is_cpu()) return std::nullopt;
  return guard_of(device).getStreamFromGlobalPool(device, /*isHighPriority=*/false);
}

Link new_link(c10::Device from, c10::Device to) {
  if (from == to) return {};
  return {new_stream(from), new_stream(to)};
}

bool has_plain_memory(const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided && !tensor.is_nested() && !tensor.is_quantized() && !tensor._is_zerotensor() &&
         !tensor.unsafeGetTensorImpl()->is_python_dispatch();
}

at::Tensor without_repeats(at::Tensor tensor) {
  for (std::int64_t d = 0; d < tensor.dim(); ++d) {
    if (tensor.stride(d) == 0 && tensor.size(d) > 1) tensor = tensor.narrow(d, 0, 1);
  }
  return tensor;
}

std::size_t lead_of(const at::Tensor& tensor) {
  if (!tensor.is_cpu() || tensor.numel() == 0) return 0;
  const auto lead = reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr()) % kAlignment;
  return lead % tensor.element_size() == 0 ? lead : 0;
}

at::Tensor empty_at(at::IntArrayRef sizes, at::IntArrayRef strides, const at::TensorOptions& options,
                    std::size_t lead) {
  const auto offset = static_cast<std::int64_t>(lead / options.dtype().itemsize());
  const bool is_empty = std::find(sizes.begin(), sizes.end(), 0) != sizes.end();
  std::int64_t extent = is_empty ? 0 : 1;
  for (std::size_t d = 0; !is_empty && d < sizes.size(); ++d) extent += (sizes[d] - 1) * strides[d];
  const auto memory = at::empty({offset + extent}, options);
  return at::empty({0}, options).set_(memory.storage(), offset, sizes, strides);
}

at::Tensor copy_of(const at::Tensor& tensor, c10::Device to, bool non_blocking) {
  at::NoGradGuard no_grad;
  const bool plain = has_plain_memory(tensor);
  const auto lead = plain && to.is_cpu() ? lead_of(tensor) : 0;
  if (!plain || (lead == 0 && tensor.is_non_overlapping_and_dense())) {
    return tensor.to(to, tensor.scalar_type(), non_blocking, /*copy=*/true);
  }
  const bool is_pinned = to.is_cpu() && non_blocking;
  auto copy = empty_at(tensor.sizes(), tensor.strides(), tensor.options().device(to).pinned_memory(is_pinned), lead);
  without_repeats(copy).copy_(without_repeats(tensor), non_blocking);
  return copy;
}

at::Tensor copy_of(const at::Tensor& tensor) { return copy_of(tensor, tensor.device()); }

namespace {

// Tensor::pin_memory() refuses a tensor that repeats elements, as expand() makes.
at::Tensor pinned(const at::Tensor& tensor) {
  if (tensor.is_pinned() || tensor.is_non_overlapping_and_dense()) return tensor.pin_memory();
  auto copy = empty_at(tensor.sizes(), tensor.strides(), tensor.options().pinned_memory(true), /*lead=*/0);
  without_repeats(copy).copy_(without_repeats(tensor));
  return copy;
}

// Whether a tensor can take another's values in place and then has its sizes and strides.
bool fits(const at::Tensor& to, const at::Tensor& from) {
  const bool has_strides = to.layout() == at::kStrided && !to.is_nested();
  return !has_strides || (to.sizes() == from.sizes() && to.strides() == from.strides());
}

}  // namespace

void overwrite(const at::Tensor& to, const at::Tensor& from) {
  at::NoGradGuard no_grad;
  use_on_current_stream(from);
  if (!fits(to, from) || to.is_sparse())
    return to.set_data(copy_of(from));  // a sparse one has no memory that an alias shares
  const auto data = to.variable_data();
  has_plain_memory(to) ? without_repeats(data).copy_(without_repeats(from)) : data.copy_(from);
}

namespace {

/// Copies tensors of one device and type by one kernel.
class ForeachCopy {
 public:
  static bool takes(const at::Tensor& tensor) {
    return !tensor.is_cpu() && has_plain_memory(tensor) && tensor.is_non_overlapping_and_dense() && !tensor.is_conj() &&
           !tensor.is_neg();
  }
  void add(const at::Tensor& to, const at::Tensor& from) {
    auto& [targets, sources] = lists_[{to.device().index(), to.scalar_type()}];
    targets.push_back(to.variable_data());
    sources.push_back(from);
  }
  void run() {
    for (auto& [key, lists] : lists_) at::_foreach_copy_(lists.first, lists.second);
  }

 private:
  using Lists = std::pair<std::vector<at::Tensor>, std::vector<at::Tensor>>;
  std::map<std::pair<c10::DeviceIndex, at::ScalarType>, Lists> lists_;
};

}  // namespace

std::vector<TensorCopy> copies_of(const std::vector<at::Tensor>& tensors) {
  at::NoGradGuard no_grad;
  std::vector<TensorCopy> copies;
  ForeachCopy together;
  for (const auto& tensor : tensors) {
    const bool is_one_of_many = ForeachCopy::takes(tensor);
    copies.push_back({tensor, is_one_of_many ? at::empty_like(tensor) : copy_of(tensor)});
    if (is_one_of_many) together.add(copies.back().value, tensor);
  }
  together.run();
  return copies;
}

void overwrite(const std::vector<TensorCopy>& copies) {
  at::NoGradGuard no_grad;
  ForeachCopy together;
  for (const auto& [tensor, value] : copies) {
    if (!ForeachCopy::takes(tensor) || !fits(tensor, value)) {
      overwrite(tensor, value);
      continue;
    }
    use_on_current_stream(value);
    together.add(tensor, value);
  }
  together.run();
}

StreamEvents start_copies(std::span<at::Tensor> tensors, const StreamEvents& ready, c10::Device to, const Link& link) {
  at::NoGradGuard no_grad;
  // PyTorch orders a copy after the current streams of both devices: make those the copy streams, not to wait.
  const c10::OptionalStreamGuard target(link.target);
  const c10::OptionalStreamGuard source(link.source);
  std::vector<c10::Device> sources;
  for (auto& tensor : tensors) {
    if (!tensor.defined() || tensor.device() == to) continue;
    const auto from = tensor.device();
    if (std::ranges::find(sources, from) == sources.end()) {
      sources.push_back(from);
      if (!from.is_cpu()) wait(ready, from);
    }
    use_on_current_stream(tensor);
    const bool is_plain = has_plain_memory(tensor);
    const auto version = version_of(tensor);
    if (is_plain && from.is_cpu()) tensor = pinned(tensor);
    tensor = copy_of(tensor, to, /*non_blocking=*/is_plain || (!from.is_cpu() && !to.is_cpu()));
    set_version(tensor, version);
  }
  StreamEvents copied;
  if (!to.is_cpu() && !sources.empty()) sources = {to};
  for (const auto device : sources) copied.push_back(record_event(device));
  return copied;
}

StreamEvents copy_to_device(std::span<at::Tensor> tensors, const StreamEvents& ready, c10::Device to,
                            const Link& link) {
  const auto stays = [&](const at::Tensor& tensor) { return tensor.defined() && tensor.device() == to; };
  if (std::ranges::any_of(tensors, stays)) wait(ready, to);
  auto copied = start_copies(tensors, ready, to, link);
  wait(copied, to);
  for (const auto& tensor : tensors) use_on_current_stream(tensor);
  return copied;
}

}  // namespace gpipe
