#include "gpipe/snapshot.h"

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "gpipe/snapshot/content.h"
#include "gpipe/snapshot/pickle.h"

namespace {

/// Reads the first and the last byte of a tensor, so that AddressSanitizer checks the accesses.
void touch(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.numel() == 0) return;
  std::int64_t last = 0;
  for (std::int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
  const auto size = static_cast<std::int64_t>(tensor.element_size());
  const auto* bytes = static_cast<const volatile char*>(tensor.const_data_ptr());
  static_cast<void>(bytes[0]);
  static_cast<void>(bytes[last * size + size - 1]);
  if (tensor.nbytes() > tensor.storage().nbytes()) std::abort();
}

}  // namespace

/// The input is the pickle of a snapshot. There are two records: "0" with 64 bytes, and "1", which is empty.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  // Copied to the heap, so that AddressSanitizer notices a read past the end.
  const std::string pickle(reinterpret_cast<const char*>(data), size);
  const std::string bytes(64, '\1');
  try {
    const auto snapshot = gpipe::from_content(gpipe::read_pickle(pickle, {{"data/0", bytes}, {"data/1", ""}}));
    for (const auto& item : snapshot.model) touch(item.value());
    touch(snapshot.random);
    for (const auto& [name, state] : snapshot.optimizer.state) {
      for (const auto& [key, value] : state) {
        if (value.isTensor()) touch(value.toTensor());
      }
    }
  } catch (const std::runtime_error&) {
  }
  return 0;
}
