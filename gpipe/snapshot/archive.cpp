#include "gpipe/snapshot/archive.h"

#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/jit_type.h>
#include <c10/util/Exception.h>
#include <caffe2/serialize/inline_container.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <torch/csrc/jit/serialization/pickler.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <functional>
#include <new>
#include <sstream>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "gpipe/snapshot/atomic_file.h"
#include "gpipe/snapshot/pickle.h"
#include "gpipe/snapshot/stored_tensors.h"
#include "gpipe/snapshot/zip_records.h"

namespace gpipe {
namespace {

at::Tensor saveable_tensor(const at::Tensor& tensor) {
  if (tensor.layout() != at::kStrided || tensor.is_meta() || !is_saveable(tensor.scalar_type())) {
    std::ostringstream what;
    what << "a tensor of type " << tensor.scalar_type() << ", layout " << tensor.layout() << ", on " << tensor.device()
         << " cannot be saved; a snapshot holds dense tensors of floating, complex, signed integer, bool or uint8 type";
    throw std::runtime_error(what.str());
  }
  auto saved = tensor.detach().cpu().resolve_conj().resolve_neg();
  if (saved.storage().nbytes() != saved.nbytes()) saved = saved.clone();
  return saved;
}

[[noreturn]] void throw_errno() { throw std::system_error(errno, std::generic_category()); }

/// A file open for reading.
class File {
 public:
  /// O_NONBLOCK: opening a pipe does not wait for a writer.
  explicit File(const std::filesystem::path& path)
      : descriptor_(::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC)) {
    if (descriptor_ < 0) throw_errno();
  }
  ~File() { ::close(descriptor_); }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  std::size_t size() const {
    struct stat status;
    if (::fstat(descriptor_, &status) != 0) throw_errno();
    if (S_ISDIR(status.st_mode)) throw std::system_error(EISDIR, std::generic_category());
    if (!S_ISREG(status.st_mode)) throw std::runtime_error("not a regular file");
    return static_cast<std::size_t>(status.st_size);
  }
  /// Returns fewer bytes if the file ends earlier.
  std::string read(std::size_t begin, std::size_t size) const {
    std::string bytes(size, '\0');
    std::size_t done = 0;
    while (done < size) {
      const auto count = ::pread(descriptor_, bytes.data() + done, size - done, static_cast<off_t>(begin + done));
      if (count == 0) break;
      if (count > 0) {
        done += static_cast<std::size_t>(count);
      } else if (errno != EINTR) {
        throw_errno();
      }
    }
    bytes.resize(done);
    return bytes;
  }

 private:
  const int descriptor_;
};

std::string read_file(const std::filesystem::path& path) {
  const File file(path);
  const auto size = file.size();
  // Checks both ends first, because a sparse file can be larger than the memory.
  const auto end = std::min(size, kZipEndSize);
  check_zip_ends(file.read(0, kZipSignatureSize), file.read(size - end, end));
  return file.read(0, size);
}

}  // namespace

c10::IValue saveable(const c10::IValue& value) {
  if (value.isTensor()) return value.toTensor().defined() ? saveable_tensor(value.toTensor()) : c10::IValue();
  if (value.isGenericDict()) {
    // Any as key and value type: otherwise the pickler writes type tags, which Python refuses.
    c10::impl::GenericDict dict(c10::AnyType::get(), c10::AnyType::get());
    for (const auto& item : value.toGenericDict()) dict.insert(item.key(), saveable(item.value()));
    return dict;
  }
  if (value.isList()) {
    c10::impl::GenericList list(c10::AnyType::get());
    for (const c10::IValue& item : value.toListRef()) list.push_back(saveable(item));
    return list;
  }
  if (value.isTuple()) {
    std::vector<c10::IValue> items;
    for (const auto& item : value.toTupleRef().elements()) items.push_back(saveable(item));
    return c10::ivalue::Tuple::create(std::move(items));
  }
  if (value.isNone() || value.isBool() || value.isInt() || value.isDouble() || value.isString()) return value;
  throw std::runtime_error("a value of type " + value.tagKind() +
                           " cannot be saved; a snapshot holds tensors, numbers, strings, and dicts, lists and tuples "
                           "of them");
}

namespace {

using Sink = std::function<void(const void* data, std::size_t size)>;

void write(const c10::IValue& value, const Sink& sink) {
  std::string pickle;
  torch::jit::Pickler pickler([&](const char* data, std::size_t size) { pickle.append(data, size); },
                              /*tensor_table=*/nullptr, /*type_renamer=*/nullptr, /*memoized_class_types=*/nullptr,
                              /*get_tensor_id=*/nullptr, /*tag_aggregates=*/false);
  pickler.protocol();
  pickler.pushIValue(value);
  pickler.stop();

  caffe2::serialize::PyTorchStreamWriter writer([&](const void* data, std::size_t size) {
    sink(data, size);
    return size;
  });
  writer.writeRecord("data.pkl", pickle.data(), pickle.size());
  std::size_t i = 0;
  for (const auto& tensor : pickler.tensorData()) {
    writer.writeRecord("data/" + std::to_string(i++), tensor.storage().data(), tensor.storage().nbytes());
  }
  writer.writeEndOfFile();
}

}  // namespace

void write_archive(const std::filesystem::path& path, const c10::IValue& value) {
  AtomicFile file(path);
  write(value, [&](const void* data, std::size_t size) { file.write(data, size); });
  file.commit();
}

std::string to_archive(const c10::IValue& value) {
  std::string bytes;
  write(value, [&](const void* data, std::size_t size) { bytes.append(static_cast<const char*>(data), size); });
  return bytes;
}

namespace {

Plain read(std::string_view bytes) {
  const auto records = zip_records(bytes);
  if (records.contains("constants.pkl")) {
    throw std::runtime_error("the file contains TorchScript, not a value saved with torch.save");
  }
  const auto order = records.find("byteorder");
  if (order != records.end() && order->second != "little") {
    throw std::runtime_error("the file was written on a machine with another byte order");
  }
  const auto pickle = records.find("data.pkl");
  if (pickle == records.end()) throw std::runtime_error("the file has no record 'data.pkl'");
  return read_pickle(pickle->second, records);
}

Plain with_plain_errors(const std::function<Plain()>& read) {
  try {
    return read();
  } catch (const std::bad_alloc&) {
    throw std::runtime_error("the file does not fit into memory");
  } catch (const std::length_error&) {
    throw std::runtime_error("the file does not fit into memory");
  } catch (const c10::Error& error) {
    throw std::runtime_error(error.what_without_backtrace());
  }
}

}  // namespace

Plain read_archive(const std::filesystem::path& path) {
  return with_plain_errors([&] { return read(read_file(path)); });
}

Plain from_archive(std::string_view bytes) {
  return with_plain_errors([&] { return read(bytes); });
}

}  // namespace gpipe
