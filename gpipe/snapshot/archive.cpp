#include "gpipe/snapshot/archive.h"

#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/jit_type.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>
#include <caffe2/serialize/inline_container.h>
#include <torch/csrc/jit/serialization/pickler.h>
#include <torch/csrc/jit/serialization/unpickler.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <unordered_map>
#include <utility>

#include "gpipe/snapshot/atomic_file.h"
#include "gpipe/snapshot/zip_records.h"

namespace gpipe {
namespace {

/// The same value with its tensors as they are to be saved.
c10::IValue saveable(const c10::IValue& value) {
  if (value.isTensor()) {
    if (!value.toTensor().defined()) return {};
    auto tensor = value.toTensor().detach().cpu();
    if (tensor.storage().nbytes() != tensor.nbytes()) tensor = tensor.clone();
    return tensor;
  }
  if (value.isGenericDict()) {
    // Of any type: the pickler then writes no type tags, which Python would refuse.
    c10::impl::GenericDict dict(c10::AnyType::get(), c10::AnyType::get());
    for (const auto& item : value.toGenericDict()) dict.insert(item.key(), saveable(item.value()));
    return dict;
  }
  if (value.isList()) {
    c10::impl::GenericList list(c10::AnyType::get());
    for (const c10::IValue& item : value.toListRef()) list.push_back(saveable(item));
    return list;
  }
  return value;
}

std::string read_file(const std::filesystem::path& path) {
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  std::ostringstream bytes;
  if (file) bytes << file.rdbuf();
  if ((!file || !bytes) && errno != 0) throw std::runtime_error(std::generic_category().message(errno));
  return std::move(bytes).str();
}

}  // namespace

void write_archive(const std::filesystem::path& path, const c10::IValue& value) {
  std::string pickle;
  torch::jit::Pickler pickler([&](const char* data, std::size_t size) { pickle.append(data, size); },
                              /*tensor_table=*/nullptr, /*type_renamer=*/nullptr, /*memoized_class_types=*/nullptr,
                              /*get_tensor_id=*/nullptr, /*tag_aggregates=*/false);
  pickler.protocol();
  pickler.pushIValue(saveable(value));
  pickler.stop();

  AtomicFile file(path);
  {
    caffe2::serialize::PyTorchStreamWriter writer([&](const void* data, std::size_t size) {
      file.write(data, size);
      return size;
    });
    writer.writeRecord("data.pkl", pickle.data(), pickle.size());
    std::size_t i = 0;
    for (const auto& tensor : pickler.tensorData()) {
      writer.writeRecord("data/" + std::to_string(i++), tensor.storage().data(), tensor.storage().nbytes());
    }
    writer.writeEndOfFile();
  }
  file.commit();
}

c10::IValue read_archive(const std::filesystem::path& path) {
  const auto bytes = read_file(path);
  const auto records = zip_records(bytes);
  if (records.contains("constants.pkl")) throw std::runtime_error("it is no snapshot: it holds TorchScript");
  const auto record = [&](const std::string& name) {
    const auto found = records.find(name);
    if (found == records.end()) throw std::runtime_error("it is no snapshot: it has no record '" + name + "'");
    return found->second;
  };

  auto pickle = record("data.pkl");
  const auto read_pickle = [&](char* to, std::size_t size) {
    size = std::min(size, pickle.size());
    std::memcpy(to, pickle.data(), size);
    pickle.remove_prefix(size);
    return size;
  };
  std::unordered_map<const void*, std::size_t> sizes;
  const auto read_storage = [&](const std::string& name) {
    const auto data = record("data/" + name);
    auto storage = c10::GetCPUAllocator()->allocate(data.size());
    std::memcpy(storage.get(), data.data(), data.size());
    sizes[storage.get()] = data.size();
    return storage;
  };
  try {
    // Without resolvers of types, any class that the pickle names is an error.
    torch::jit::Unpickler unpickler(read_pickle, /*type_resolver=*/nullptr, /*obj_loader=*/nullptr, read_storage,
                                    /*device=*/at::kCPU);
    auto value = unpickler.parse_ivalue();
    value.visit([&](const c10::IValue& part) {
      if (!part.isTensor() || !part.toTensor().has_storage() || part.toTensor().storage().nbytes() == 0) return false;
      const auto& storage = part.toTensor().storage();
      TORCH_CHECK(storage.nbytes() <= sizes[storage.data()], "a tensor is larger than its record");
      return false;
    });
    return value;
  } catch (const c10::Error& error) {
    throw std::runtime_error("it is no snapshot, but something else in a zip file: " +
                             std::string(error.what_without_backtrace()));
  }
}

}  // namespace gpipe
