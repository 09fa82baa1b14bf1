// The operators of the device. Those without a kernel of their own run the CPU's.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <tuple>
#include <vector>

#include "tests/accelerator/device.h"

namespace gpipe::accelerator {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

bool only_makes_views(const c10::FunctionSchema& schema) {
  if (schema.returns().empty()) return false;
  return std::all_of(schema.returns().begin(), schema.returns().end(), [](const c10::Argument& result) {
    return result.alias_info() != nullptr && !result.alias_info()->isWrite();
  });
}

bool is_generator(const c10::Argument& argument) {
  const auto optional = argument.type()->cast<c10::OptionalType>();
  return optional && optional->getElementType()->kind() == c10::TypeKind::GeneratorType;
}

// Replaces the device's tensors, generators and devices by those of the host.
void to_host(HostCall& call, const c10::Argument& argument, c10::IValue& value) {
  const bool writes = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
  if (value.isTensor()) {
    value = call.argument(value.toTensor(), writes);
  } else if (value.isTensorList()) {
    auto tensors = value.toTensorVector();
    for (auto& tensor : tensors) tensor = call.argument(tensor, writes);
    value = tensors;
  } else if (value.isOptionalTensorList()) {
    c10::List<OptionalTensor> tensors;
    for (const OptionalTensor& tensor : value.toOptionalTensorList()) {
      tensors.push_back(tensor ? OptionalTensor(call.argument(*tensor)) : std::nullopt);
    }
    value = tensors;
  } else if (value.isGenerator() && value.toGenerator().device().type() == kType) {
    value = host_generator(value.toGenerator());
  } else if (value.isDevice() && value.toDevice().type() == kType) {
    if (value.toDevice().has_index()) call.set_device(value.toDevice());
    value = c10::Device(c10::kCPU);
  }
}

void to_device(HostCall& call, c10::IValue& value) {
  if (value.isTensor()) {
    value = call.result(value.toTensor());
  } else if (value.isTensorList()) {
    auto tensors = value.toTensorVector();
    for (auto& tensor : tensors) tensor = call.result(tensor);
    value = tensors;
  }
}

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  HostCall call(schema.name());
  const auto& arguments = schema.arguments();
  auto* values = stack->data() + stack->size() - arguments.size();
  for (std::size_t i = 0; i < arguments.size(); ++i) to_host(call, arguments[i], values[i]);
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    if (values[i].isNone() && is_generator(arguments[i])) values[i] = host_generator(default_generator(call.device()));
  }
  {
    const KernelsOnly kernels;
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }
  for (auto i = stack->size() - schema.returns().size(); i < stack->size(); ++i) to_device(call, (*stack)[i]);
  if (!only_makes_views(schema)) call.launch();
}

Tensor empty(c10::IntArrayRef sizes, std::optional<at::ScalarType> type, std::optional<at::Layout>,
             std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(sizes, &allocator(), kKeys, c10::dtype_or_default(type), format);
}

Tensor empty_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides, std::optional<at::ScalarType> type,
                     std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(sizes, strides, &allocator(), kKeys, c10::dtype_or_default(type));
}

// As on CUDA: a copy runs on the source's stream, after and before the work of the target's. The host waits for a copy
// to or from itself.
Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  {
    const KernelsOnly kernels;
    const auto target = on_device(to) ? alias_on_host(to) : to;
    target.copy_(on_device(from) ? alias_on_host(from) : from);
  }
  auto& order = stream_order();
  const int source = current_stream(on_device(from) ? from.device() : to.device());
  const int target = current_stream(on_device(to) ? to.device() : from.device());
  std::vector<Access> accesses;
  add_access(from, /*writes=*/false, accesses);
  add_access(to, /*writes=*/true, accesses);
  if (source != target) order.order(target, source);
  order.launch(source, "copy", accesses);
  if (source != target) order.order(source, target);
  if (from.device() != to.device()) order.count(&Counts::copies);
  if (on_device(from) && on_device(to)) return to;
  if (non_blocking) {
    order.report("a copy between the host and a device does not block, so the host may use the memory too early");
  }
  order.synchronize(source);
  return to;
}

const Tensor& resize_memory(const Tensor& tensor, c10::IntArrayRef sizes, std::optional<at::MemoryFormat>) {
  const auto elements = static_cast<std::size_t>(c10::multiply_integers(sizes) + tensor.storage_offset());
  const auto bytes = elements * tensor.itemsize();
  const auto storage = tensor.storage();
  if (bytes > storage.nbytes()) {
    const c10::DeviceGuard guard(tensor.device());
    auto data = allocator().allocate(bytes);
    if (const auto* before = block_of(tensor)) {
      std::memcpy(block_of(data)->host.mutable_data(), before->host.data(), storage.nbytes());
    }
    storage.set_data_ptr(std::move(data));
    storage.set_nbytes(bytes);
  }
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return tensor;
}

Tensor copy_and_resize(const Tensor& from, const Tensor& to) {
  resize_memory(to, from.sizes(), std::nullopt);
  return copy_from(from, to, /*non_blocking=*/false);
}

Tensor& set_storage(Tensor& tensor, at::Storage storage, std::int64_t offset, c10::IntArrayRef sizes,
                    c10::IntArrayRef strides) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  if (strides.size() == sizes.size()) {
    impl->set_sizes_and_strides(sizes, strides, offset);
  } else {
    impl->set_sizes_contiguous(sizes);
    impl->set_storage_offset(offset);
  }
  return tensor;
}

at::Scalar item(const Tensor& tensor) {
  auto& order = stream_order();
  const int stream = current_stream(tensor.device());
  std::vector<Access> accesses;
  add_access(tensor, /*writes=*/false, accesses);
  order.launch(stream, "item", accesses);
  order.synchronize(stream);
  const KernelsOnly kernels;
  return alias_on_host(tensor).item();
}

void record_stream(Tensor& tensor, at::Stream stream) {
  c10::impl::getDeviceGuardImpl(kType)->recordDataPtrOnStream(tensor.storage().data_ptr(), stream);
}

// PyTorch sends convolutions of other devices to operators that the CPU lacks.
Tensor convolution(const Tensor& input, const Tensor& weight, const OptionalTensor& bias, c10::IntArrayRef stride,
                   c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed,
                   c10::IntArrayRef output_padding, std::int64_t groups) {
  HostCall call("aten::convolution");
  const auto x = call.argument(input);
  const auto w = call.argument(weight);
  const auto b = bias && bias->defined() ? OptionalTensor(call.argument(*bias)) : std::nullopt;
  Tensor result;
  {
    const KernelsOnly kernels;
    result = at::convolution(x, w, b, stride, padding, dilation, transposed, output_padding, groups);
  }
  result = call.result(result);
  call.launch();
  return result;
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(const Tensor& gradient, const Tensor& input,
                                                        const Tensor& weight, c10::IntArrayRef stride,
                                                        c10::IntArrayRef padding, c10::IntArrayRef dilation,
                                                        bool transposed, c10::IntArrayRef output_padding,
                                                        std::int64_t groups, std::array<bool, 3> mask) {
  HostCall call("aten::convolution_backward");
  const auto g = call.argument(gradient);
  const auto x = call.argument(input);
  const auto w = call.argument(weight);
  const std::int64_t bias = transposed ? w.size(1) * groups : w.size(0);
  std::tuple<Tensor, Tensor, Tensor> results;
  {
    const KernelsOnly kernels;
    results = at::convolution_backward(g, x, w, c10::IntArrayRef(bias), stride, padding, dilation, transposed,
                                       output_padding, groups, mask);
  }
  auto& [of_input, of_weight, of_bias] = results;
  for (auto* result : {&of_input, &of_weight, &of_bias}) *result = call.result(*result);
  call.launch();
  return results;
}

// The CPU's kernel draws from the CPU's default generator.
std::tuple<Tensor, Tensor> dropout(const Tensor& input, double p, std::optional<bool> train) {
  HostCall call("aten::native_dropout");
  const auto x = call.argument(input);
  Tensor mask;
  Tensor result;
  {
    const KernelsOnly kernels;
    mask = at::ones_like(x, x.options().dtype(at::kBool));
    result = x.clone();
    if (train.value_or(true)) {
      mask.bernoulli_(1 - p, host_generator(default_generator(call.device())));
      result.mul_(mask).mul_(p == 1 ? 0 : 1 / (1 - p));
    }
  }
  const std::tuple<Tensor, Tensor> results{call.result(result), call.result(mask)};
  call.launch();
  return results;
}

bool same_kind(const Tensor&, const Tensor&) { return true; }

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) { library.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", TORCH_FN(empty));
  library.impl("empty_strided", TORCH_FN(empty_strided));
  library.impl("_copy_from", TORCH_FN(copy_from));
  library.impl("_copy_from_and_resize", TORCH_FN(copy_and_resize));
  library.impl("resize_", TORCH_FN(resize_memory));
  library.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage));
  library.impl("_local_scalar_dense", TORCH_FN(item));
  library.impl("record_stream", TORCH_FN(record_stream));
  library.impl("convolution_overrideable", TORCH_FN(convolution));
  library.impl("convolution_backward_overrideable", TORCH_FN(convolution_backward));
  library.impl("native_dropout", TORCH_FN(dropout));
  library.impl("_has_compatible_shallow_copy_type", TORCH_FN(same_kind));  // for Module::to
}

}  // namespace
}  // namespace gpipe::accelerator
