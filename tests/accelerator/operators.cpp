// The operators of the device. Those without a kernel of their own run the CPU's.

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "tests/accelerator/device.h"

namespace gpipe::accelerator {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

// Keeps the dispatch keys of its base: in inference mode, a view of a normal tensor is a normal tensor.
Tensor view_of(const Tensor& base, const Tensor& shape) {
  auto view = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(base.storage()),
                                                       base.key_set(), shape.dtype());
  take_shape(view, shape);
  return view;
}

Tensor new_tensor(const Tensor& on_host, c10::Device device) {
  c10::Storage storage(c10::Storage::use_byte_size_t(), on_host.storage().nbytes(), adopt(on_host.storage(), device),
                       &allocator(), /*resizable=*/true);
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), kKeys, on_host.dtype());
  take_shape(tensor, on_host);
  return tensor;
}

/// One operator of a device, run by the host on aliases of its tensors. `operation` must outlive stream_order().
class HostCall {
 public:
  explicit HostCall(std::string_view operation) : operation_(operation) {}

  /// The device of the arguments, or the current one if there are none yet.
  c10::Device device() const { return device_ ? *device_ : c10::impl::VirtualGuardImpl(kType).getDevice(); }
  /// Sets the device of an operator that has no tensor arguments.
  void set_device(c10::Device device) { device_ = device; }

  /// Returns an alias of an argument. CPU tensors and undefined tensors are returned as they are. Errors: c10::Error
  /// for tensors of two devices. A CPU tensor without dimensions counts as a number.
  Tensor argument(const Tensor& tensor, bool writes) {
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

  /// Returns the device's tensor for a result: an argument, a view of one, or a new tensor.
  Tensor result(const Tensor& result) {
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

  /// Checks what the operator reads and writes, on the device's current stream. A view reads nothing: do not call it.
  void launch() {
    // Indices may be on the host.
    TORCH_CHECK(!takes_host_tensor_ || aliases_.empty() || operation_.find("index") != std::string_view::npos,
                operation_, " takes a tensor of ", device(), " and one of the CPU");
    std::vector<Access> accesses;
    for (const auto& [tensor, writes] : used_) add_access(tensor, writes, accesses);
    if (!accesses.empty()) stream_order().launch(current_stream(device()), operation_, accesses, work());
  }

 private:
  Work work() const {
    Work work;
    for (const auto& [tensor, writes] : used_) work.bytes += static_cast<double>(tensor.numel() * tensor.itemsize());
    const auto is = [&](const auto&... names) { return ((operation_ == names) || ...); };
    // The last tensor used is the result; `k` counts the tensors of the arguments.
    const auto elements = [&](std::size_t k) { return static_cast<double>(used_[k].first.numel()); };
    const auto result = static_cast<double>(used_.back().first.numel());
    if (is("aten::mm", "aten::bmm")) work.products = 2 * result * static_cast<double>(used_[0].first.size(-1));
    if (is("aten::addmm", "aten::baddbmm")) work.products = 2 * result * static_cast<double>(used_[1].first.size(-1));
    if (is("aten::convolution")) work.products = 2 * result * elements(1) / static_cast<double>(used_[1].first.size(0));
    if (is("aten::convolution_backward"))
      work.products = 4 * elements(0) * elements(2) / static_cast<double>(used_[2].first.size(0));
    return work;
  }

  const std::string_view operation_;
  std::optional<c10::Device> device_;
  bool takes_host_tensor_ = false;
  std::vector<std::pair<Tensor, Tensor>> aliases_;  // the device's tensor, its alias
  std::vector<std::pair<Tensor, bool>> used_;       // the device's tensor, whether it is written
};

/// Whether an operator only makes views, or memory.
bool has_no_kernel(const c10::FunctionSchema& schema) {
  const auto& name = schema.name();
  if (name.starts_with("aten::empty") || name == "aten::resize_") return true;
  return !schema.returns().empty() && std::ranges::all_of(schema.returns(), [](const c10::Argument& result) {
    return result.alias_info() != nullptr && !result.alias_info()->isWrite();
  });
}

bool is_generator(const c10::Argument& argument) {
  const auto optional = argument.type()->cast<c10::OptionalType>();
  return optional && optional->getElementType()->kind() == c10::TypeKind::GeneratorType;
}

/// Replaces each tensor of a value.
template <class Function>
void replace_tensors(c10::IValue& value, Function replace) {
  if (value.isTensor()) {
    value = replace(value.toTensor());
  } else if (value.isTensorList()) {
    auto tensors = value.toTensorVector();
    for (auto& tensor : tensors) tensor = replace(tensor);
    value = tensors;
  } else if (value.isOptionalTensorList()) {
    c10::List<OptionalTensor> tensors;
    for (const OptionalTensor& tensor : value.toOptionalTensorList()) {
      tensors.push_back(tensor ? OptionalTensor(replace(*tensor)) : std::nullopt);
    }
    value = tensors;
  }
}

// Replaces the device's tensors, generators and devices by those of the host.
void to_host(HostCall& call, const c10::Argument& argument, c10::IValue& value) {
  const bool writes = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
  replace_tensors(value, [&](const Tensor& tensor) { return call.argument(tensor, writes); });
  if (value.isGenerator() && value.toGenerator().device().type() == kType) {
    value = host_generator(value.toGenerator());
  } else if (value.isDevice() && value.toDevice().type() == kType) {
    if (value.toDevice().has_index()) call.set_device(value.toDevice());
    value = c10::Device(c10::kCPU);
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
  for (auto i = stack->size() - schema.returns().size(); i < stack->size(); ++i) {
    replace_tensors((*stack)[i], [&](const Tensor& tensor) { return call.result(tensor); });
  }
  if (!has_no_kernel(schema)) call.launch();
}

// As on CUDA: a copy runs on the source's stream, after and before the work of the target's. The host waits for a copy
// to or from itself, unless its memory is pinned. Then a copy to the host has any values until the host waits.
Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  const KernelsOnly kernels;
  const auto values = on_device(from) ? alias_on_host(from) : from;
  const bool uses_host = !on_device(from) || !on_device(to);
  const bool blocks = uses_host && !(non_blocking && is_pinned((on_device(from) ? to : from).const_data_ptr()));
  auto& order = stream_order();
  const int source = current_stream(on_device(from) ? from.device() : to.device());
  const int target = current_stream(on_device(to) ? to.device() : from.device());
  std::vector<Access> accesses;
  add_access(from, /*writes=*/false, accesses);
  add_access(to, /*writes=*/true, accesses);
  if (source != target) order.order(target, source);
  Work work{.bytes = static_cast<double>(from.numel() * from.itemsize())};
  if (from.device() != to.device()) {
    work.copies_from = on_device(from) ? from.device().index() : -1;
    work.copies_to = on_device(to) ? to.device().index() : -1;
  } else {
    work.bytes *= 2;
  }
  order.launch(source, "copy", accesses, work);
  if (source != target) order.order(source, target);
  if (on_device(to) || blocks) {
    (on_device(to) ? alias_on_host(to) : to).copy_(values);
    if (blocks) order.synchronize(source);
    return to;
  }
  if (to.is_contiguous()) std::memset(to.mutable_data_ptr(), 0xff, to.nbytes());
  order.when_over(source, [to, values = values.clone()] {
    const KernelsOnly kernels;
    to.copy_(values);
  });
  return to;
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
  const KernelsOnly kernels;
  return tensor.cpu().item();
}

void record_stream(Tensor& tensor, at::Stream stream) {
  c10::impl::getDeviceGuardImpl(kType)->recordDataPtrOnStream(tensor.storage().data_ptr(), stream);
}

c10::OperatorHandle operator_named(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
}

// PyTorch sends convolutions of other devices to operators that the CPU lacks.
void convolution(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  run_on_host(operator_named("aten::convolution"), stack);
}

// The CPU's operator has one more argument, the fourth: the sizes of the bias.
void convolution_backward(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  const auto arguments = stack->end() - 10;
  const auto& weight = arguments[2].toTensor();
  const bool transposed = arguments[6].toBool();
  const auto channels = transposed ? weight.size(1) * arguments[8].toInt() : weight.size(0);
  stack->insert(arguments + 3, c10::IValue(std::vector<std::int64_t>{channels}));
  run_on_host(operator_named("aten::convolution_backward"), stack);
}

// The CPU's kernel draws from the CPU's default generator.
std::tuple<Tensor, Tensor> dropout(const Tensor& input, double p, std::optional<bool>) {
  const KernelsOnly kernels;
  const auto mask = at::empty_like(input, at::kBool).bernoulli_(1 - p);
  return {input * mask * (1 / (1 - p)), mask};
}

bool same_kind(const Tensor&, const Tensor&) { return true; }

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) { library.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("_copy_from", TORCH_FN(copy_from));
  library.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage));
  library.impl("_local_scalar_dense", TORCH_FN(item));
  library.impl("record_stream", TORCH_FN(record_stream));
  library.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  library.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
  library.impl("native_dropout", TORCH_FN(dropout));
  library.impl("_foreach_copy_", torch::CppFunction::makeFromBoxedFunction<&run_on_host>());  // one kernel, as on CUDA
  library.impl("_has_compatible_shallow_copy_type", TORCH_FN(same_kind));                     // for Module::to
}

}  // namespace
}  // namespace gpipe::accelerator
