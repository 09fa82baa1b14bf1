#include "gpipe/snapshot/stored_tensors.h"

#include <ATen/ops/empty.h>
#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <iterator>
#include <stdexcept>
#include <utility>

namespace gpipe {
namespace {

constexpr c10::ScalarType kTypes[] = {c10::kFloat, c10::kDouble, c10::kHalf,         c10::kBFloat16,
                                      c10::kLong,  c10::kInt,    c10::kShort,        c10::kChar,
                                      c10::kByte,  c10::kBool,   c10::kComplexFloat, c10::kComplexDouble};

[[noreturn]] void damaged_record(const std::string& what) { throw std::runtime_error("the file is damaged: " + what); }

/// Whether a tensor lies inside a storage of `elements` elements and has at most as many.
bool fits(std::int64_t offset, const std::vector<std::int64_t>& sizes, const std::vector<std::int64_t>& strides,
          std::int64_t elements) {
  if (sizes.size() != strides.size() || offset < 0 || offset > elements) return false;
  std::int64_t count = 1;
  std::int64_t last = offset;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] < 0 || strides[i] < 0 || __builtin_mul_overflow(count, sizes[i], &count)) return false;
    std::int64_t distance = 0;
    if (sizes[i] > 1 && (__builtin_mul_overflow(sizes[i] - 1, strides[i], &distance) ||
                         __builtin_add_overflow(last, distance, &last))) {
      return false;
    }
  }
  return count == 0 || (count <= elements && last < elements);
}

}  // namespace

bool is_saveable(c10::ScalarType type) { return std::ranges::find(kTypes, type) != std::end(kTypes); }

std::optional<c10::ScalarType> element_type(std::string_view storage_class) {
  for (const auto type : kTypes) {
    if (storage_class == std::string("torch.") + c10::toString(type) + "Storage") return type;
  }
  return {};
}

Stored StoredTensors::get(const std::string& key, c10::ScalarType type, std::int64_t count) {
  const auto name = "data/" + key;
  const auto record = records_.find(name);
  if (record == records_.end()) damaged_record("it has no record '" + name + "'");
  const auto size = record->second.size();
  const auto element = c10::elementSize(type);
  if (count < 0 || size % element != 0 || static_cast<std::uint64_t>(count) != size / element) {
    damaged_record("record '" + name + "' has " + std::to_string(size) + " bytes, not " + std::to_string(count) +
                   " elements of " + std::to_string(element) + " bytes");
  }
  auto [storage, added] = storages_.try_emplace(name);
  if (added) {
    auto* allocator = c10::GetCPUAllocator();
    auto data = allocator->allocate(size);
    if (size != 0) std::memcpy(data.get(), record->second.data(), size);
    storage->second = at::Storage(at::Storage::use_byte_size_t(), size, std::move(data), allocator, true);
  }
  return {storage->second, type};
}

at::Tensor make_tensor(const Stored& stored, std::int64_t offset, const std::vector<std::int64_t>& sizes,
                       const std::vector<std::int64_t>& strides) {
  const auto elements = stored.storage.nbytes() / c10::elementSize(stored.type);
  if (!fits(offset, sizes, strides, static_cast<std::int64_t>(elements))) {
    damaged_record("a tensor lies outside its record of " + std::to_string(elements) + " elements");
  }
  return at::empty({0}, at::TensorOptions(stored.type)).set_(stored.storage, offset, sizes, strides);
}

}  // namespace gpipe
