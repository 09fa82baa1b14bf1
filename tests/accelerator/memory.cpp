#include "tests/accelerator/memory.h"

#include <ATen/EmptyTensor.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>

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

void take_shape(const at::Tensor& tensor, const at::Tensor& of) {
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(of.sizes(), of.strides(), of.storage_offset());
}

at::Tensor alias_on_host(const at::Tensor& tensor) {
  const auto* block = block_of(tensor);
  const c10::Storage no_memory(c10::Storage::use_byte_size_t(), 0, c10::GetCPUAllocator(), /*resizable=*/true);
  auto alias = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(block ? block->host : no_memory),
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

}  // namespace gpipe::accelerator
