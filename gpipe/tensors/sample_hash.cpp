#include "gpipe/tensors/sample_hash.h"

#include <algorithm>

#include "gpipe/tensors/transfer.h"

namespace gpipe {
namespace {

constexpr std::int64_t kSamples = 8;  // per tensor

// FNV-1a.
class Hash {
 public:
  void add(const void* data, std::size_t bytes) {
    const auto* each = static_cast<const unsigned char*>(data);
    for (std::size_t i = 0; i < bytes; ++i) value_ = (value_ ^ each[i]) * 1099511628211u;
  }
  void add(std::int64_t number) { add(&number, sizeof number); }
  std::uint64_t value() const { return value_ == 0 ? 1 : value_; }

 private:
  std::uint64_t value_ = 14695981039346656037u;
};

// The place in memory of an element, counted in elements from the first.
std::int64_t place_of(std::int64_t element, const at::Tensor& tensor) {
  std::int64_t place = 0;
  for (auto d = tensor.dim() - 1; d >= 0; --d) {
    place += element % tensor.size(d) * tensor.stride(d);
    element /= tensor.size(d);
  }
  return place;
}

}  // namespace

std::uint64_t sample_hash(const std::vector<at::Tensor>& tensors) {
  Hash hash;
  for (const auto& tensor : tensors) {
    hash.add(tensor.defined() ? static_cast<std::int64_t>(tensor.scalar_type()) : -1);
    if (!tensor.defined()) continue;
    if (!tensor.is_cpu() || !has_plain_memory(tensor)) return 0;
    for (const auto size : tensor.sizes()) hash.add(size);
    const auto* first = static_cast<const std::byte*>(tensor.const_data_ptr());
    const auto bytes = tensor.element_size();
    const auto samples = std::min(kSamples, tensor.numel());
    for (std::int64_t i = 0; i < samples; ++i) {
      const auto element = samples == 1 ? 0 : i * (tensor.numel() - 1) / (samples - 1);
      hash.add(first + place_of(element, tensor) * static_cast<std::int64_t>(bytes), bytes);
    }
  }
  return hash.value();
}

}  // namespace gpipe
