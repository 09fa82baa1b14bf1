#include "tests/accelerator/memory.h"

#include <ATen/EmptyTensor.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cstdint>
#include <utility>

namespace gpipe::accelerator {
namespace {

// No address of this kind exists, so a host that reads device memory crashes.
void* address_on_device(const void* host) {
  constexpr std::uintptr_t kDevice = std::uintptr_t{1} << 62;
  return host == nullptr ? nullptr : reinterpret_cast<void*>(reinterpret_cast<std::uintptr_t>(host) | kDevice);
}

void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  stream_order().freed(block->allocation);
  delete block;
}

class Allocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    const auto device = c10::impl::VirtualGuardImpl(kType).getDevice();
    return adopt({c10::Storage::use_byte_size_t(), bytes, c10::GetCPUAllocator(), /*resizable=*/true}, device);
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }
};

}  // namespace

StreamOrder& stream_order() {
  static auto* order = new StreamOrder;
  return *order;
}

int current_stream(c10::Device device) {
  return stream_order().index(device.index(), c10::impl::VirtualGuardImpl(kType).getStream(device).id());
}

c10::DataPtr adopt(c10::Storage host, c10::Device device) {
  auto* block = new Block{std::move(host), {.home = current_stream(device)}};
  return {address_on_device(block->host.data()), block, &free_block, device};
}

Block* block_of(const c10::DataPtr& data) {
  return data.get_deleter() == &free_block ? static_cast<Block*>(data.get_context()) : nullptr;
}

bool is_stale(const Block& block, const c10::DataPtr& data) {
  return address_on_device(block.host.data()) != data.get();
}

c10::Allocator& allocator() {
  static auto* it = new Allocator;
  return *it;
}

namespace {

void take_shape(const at::Tensor& tensor, const at::Tensor& of) {
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(of.sizes(), of.strides(), of.storage_offset());
}

// Keeps the dispatch keys of its base: in inference mode, a view of a normal tensor is a normal tensor.
at::Tensor view_of(const at::Tensor& base, const at::Tensor& shape) {
  auto view = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(base.storage()),
                                                       base.key_set(), shape.dtype());
  take_shape(view, shape);
  return view;
}

at::Tensor new_tensor(const at::Tensor& on_host, c10::Device device) {
  c10::Storage storage(c10::Storage::use_byte_size_t(), on_host.storage().nbytes(), adopt(on_host.storage(), device),
                       &allocator(), /*resizable=*/true);
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), on_host.dtype());
  take_shape(tensor, on_host);
  return tensor;
}

c10::Storage no_memory() { return {c10::Storage::use_byte_size_t(), 0, c10::GetCPUAllocator(), true}; }

}  // namespace

at::Tensor alias_on_host(const at::Tensor& tensor) {
  const auto* block = block_of(tensor);
  auto alias = at::detail::make_tensor<c10::TensorImpl>(block ? c10::Storage(block->host) : no_memory(),
                                                        c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  take_shape(alias, tensor);
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) alias.unsafeGetTensorImpl()->set_wrapped_number(true);
  if (tensor.is_conj()) alias._set_conj(true);
  if (tensor.is_neg()) alias._set_neg(true);
  return alias;
}

void add_access(const at::Tensor& tensor, bool writes, std::vector<Access>& accesses) {
  auto* block = on_device(tensor) && tensor.numel() > 0 ? block_of(tensor) : nullptr;
  if (block) accesses.push_back({&block->allocation, writes, tensor.sizes()});
}

c10::Device HostCall::device() const { return device_ ? *device_ : c10::impl::VirtualGuardImpl(kType).getDevice(); }

at::Tensor HostCall::argument(const at::Tensor& tensor, bool writes) {
  if (!on_device(tensor)) {
    takes_host_tensor_ = takes_host_tensor_ || (tensor.defined() && tensor.dim() > 0);
    return tensor;
  }
  if (!device_) device_ = tensor.device();
  TORCH_CHECK(*device_ == tensor.device(), operation_, " takes a tensor of ", *device_, " and one of ",
              tensor.device());
  used_.emplace_back(tensor, writes);
  for (const auto& [known, alias] : aliases_) {
    if (known.is_same(tensor)) return alias;
  }
  return aliases_.emplace_back(tensor, alias_on_host(tensor)).second;
}

at::Tensor HostCall::result(const at::Tensor& result) {
  if (!result.defined()) return result;
  for (const auto& [tensor, alias] : aliases_) {
    if (!alias.is_same(result)) continue;
    if (auto* block = block_of(tensor); block && is_stale(*block, tensor.storage().data_ptr())) {
      const auto host = block->host;
      tensor.storage().set_data_ptr(adopt(host, device()));
      tensor.storage().set_nbytes(host.nbytes());
    }
    if (tensor.sizes() != alias.sizes() || tensor.strides() != alias.strides()) take_shape(tensor, alias);
    return tensor;
  }
  for (const auto& [tensor, alias] : aliases_) {
    if (alias.is_alias_of(result)) return view_of(tensor, result);
  }
  auto tensor = new_tensor(result, device());
  used_.emplace_back(tensor, true);
  return tensor;
}

void HostCall::launch() {
  // Indices may be on the host.
  TORCH_CHECK(!takes_host_tensor_ || aliases_.empty() || operation_.find("index") != std::string_view::npos, operation_,
              " takes a tensor of ", device(), " and one of the CPU");
  std::vector<Access> accesses;
  for (const auto& [tensor, writes] : used_) add_access(tensor, writes, accesses);
  if (!accesses.empty()) stream_order().launch(current_stream(device()), operation_, accesses);
}

}  // namespace gpipe::accelerator
