#include "gpipe/snapshot/safetensors.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/view_as_complex.h>
#include <ATen/ops/view_as_real.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstdio>
#include <fstream>
#include <sstream>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_format.h"
#include "gpipe/base/checks.h"
#include "gpipe/base/json.h"

namespace gpipe {
namespace {

using nlohmann::json;

static_assert(std::endian::native == std::endian::little, "the format is little endian");

constexpr std::array<std::pair<const char*, at::ScalarType>, 15> kTypes = {{
    {"BOOL", at::kBool},
    {"U8", at::kByte},
    {"I8", at::kChar},
    {"F8_E5M2", at::kFloat8_e5m2},
    {"F8_E4M3", at::kFloat8_e4m3fn},
    {"I16", at::kShort},
    {"U16", at::kUInt16},
    {"F16", at::kHalf},
    {"BF16", at::kBFloat16},
    {"I32", at::kInt},
    {"U32", at::kUInt32},
    {"F32", at::kFloat},
    {"F64", at::kDouble},
    {"I64", at::kLong},
    {"C64", at::kComplexFloat},
}};

constexpr char kMetadata[] = "__metadata__";
constexpr char kChecksumKey[] = "\"checksum\":\"";  // as it is in the header, where a quote within a text is escaped
constexpr char kNoChecksum[] = "00000000";
constexpr std::size_t kChecksumSize = sizeof kNoChecksum - 1;
constexpr std::uint64_t kMaxHeader = 100'000'000;  // the limit of the format's first implementation

[[noreturn]] void refuse(const std::string& what) { throw_error(what); }

/// A CRC-32 of bytes in order.
class Checksum {
 public:
  void add(const void* data, std::size_t size) {
    if (size > 0) value_ = crc32_z(value_, static_cast<const Bytef*>(data), size);  // no data would restart the sum
  }
  /// Returns eight hexadecimal digits.
  std::string text() const { return absl::StrFormat("%08x", value_); }

 private:
  uLong value_ = 0;
};

/// Returns the tensor's values, dense on the CPU.
at::Tensor stored(const std::string& name, const at::Tensor& tensor) {
  if (!tensor.defined()) refuse("tensor '" + name + "' is undefined and cannot be saved");
  const bool has_type = tensor.scalar_type() == at::kComplexDouble ||
                        std::ranges::any_of(kTypes, [&](auto& type) { return type.second == tensor.scalar_type(); });
  if (tensor.layout() != at::kStrided || tensor.is_meta() || !has_type) {
    std::ostringstream what;
    what << "tensor '" << name << "' of type " << tensor.scalar_type() << " and layout " << tensor.layout() << " on "
         << tensor.device() << " cannot be saved: a file holds dense tensors of the types that safetensors has";
    refuse(what.str());
  }
  const auto values = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous();
  return values.scalar_type() == at::kComplexDouble ? at::view_as_real(values) : values;
}

const char* name_of(at::ScalarType type) {
  return std::ranges::find(kTypes, type, [](auto& entry) { return entry.second; })->first;
}

struct Entry {
  std::string name;
  at::ScalarType type;
  std::vector<std::int64_t> shape;
  std::uint64_t begin;
  std::uint64_t end;
};

/// Returns the number of bytes. Errors: std::runtime_error if it has more than 63 bits.
std::uint64_t bytes_of(const Entry& entry) {
  // Strides ignore sizes of zero.
  std::int64_t strided = static_cast<std::int64_t>(c10::elementSize(entry.type));
  bool empty = false;
  for (const auto size : entry.shape) {
    if (size < 0 || __builtin_mul_overflow(strided, std::max<std::int64_t>(size, 1), &strided)) {
      refuse("the shape of '" + entry.name + "' is out of range");
    }
    empty = empty || size == 0;
  }
  return empty ? 0 : static_cast<std::uint64_t>(strided);
}

Entry entry_of(const std::string& name, const json& from) {
  try {
    const auto type =
        std::ranges::find(kTypes, from.at("dtype").get<std::string>(), [](auto& each) { return each.first; });
    if (type == kTypes.end()) refuse("'" + name + "' has the unknown type " + from.at("dtype").dump());
    for (const auto& number : {from.at("shape"), from.at("data_offsets")}) {
      for (const auto& each : number) {
        if (!each.is_number_unsigned()) refuse("'" + name + "' has the shape or offset " + each.dump());
      }
    }
    if (from.at("data_offsets").size() != 2) refuse("'" + name + "' has no begin and end");
    const auto offsets = from.at("data_offsets").get<std::array<std::uint64_t, 2>>();
    return {name, type->second, from.at("shape").get<std::vector<std::int64_t>>(), offsets[0], offsets[1]};
  } catch (const json::exception&) {
    refuse("'" + name + "' is not described as a tensor");
  }
}

/// Returns the header's tensors in the order of their bytes. Errors: std::runtime_error unless these fill `size` bytes.
std::vector<Entry> entries_of(const json& header, std::uint64_t size) {
  std::vector<Entry> entries;
  for (const auto& [name, entry] : header.items()) {
    if (name != kMetadata) entries.push_back(entry_of(name, entry));
  }
  std::ranges::sort(entries, {}, [](const Entry& entry) { return std::pair(entry.begin, entry.end); });
  std::uint64_t end = 0;
  for (const auto& entry : entries) {
    if (entry.begin != end || entry.end < end || entry.end > size || entry.end - entry.begin != bytes_of(entry)) {
      refuse("the place of '" + entry.name + "' does not fit its shape or the file");
    }
    end = entry.end;
  }
  if (end != size) refuse(std::to_string(size - end) + " bytes belong to no tensor");
  return entries;
}

std::error_code last_error() { return {errno, std::generic_category()}; }

/// Locks the temporary file. Fails with operation_would_block if another writer has locked it, or has renamed it since
/// it was opened here. Ignores file systems that cannot lock.
std::error_code lock(int file, const std::filesystem::path& path) {
  if (::flock(file, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) return last_error();
  struct stat opened;
  struct stat named;
  if (::fstat(file, &opened) != 0) return last_error();
  if (::stat(path.c_str(), &named) != 0 || opened.st_ino != named.st_ino) {
    return std::make_error_code(std::errc::operation_would_block);
  }
  return {};
}

std::error_code write_all(int file, const void* data, std::size_t size) {
  auto rest = static_cast<const char*>(data);
  while (size > 0) {
    const auto written = ::write(file, rest, size);
    if (written >= 0) {
      rest += written;
      size -= written;
    } else if (errno != EINTR) {
      return last_error();
    }
  }
  return {};
}

/// Makes a rename durable. Some file systems cannot flush a folder and return EINVAL, which is ignored.
std::error_code flush_folder(std::filesystem::path folder) {
  if (folder.empty()) folder = ".";
  const int descriptor = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) return last_error();
  std::error_code error;
  if (::fsync(descriptor) != 0 && errno != EINVAL) error = last_error();
  ::close(descriptor);
  return error;
}

}  // namespace

void replace_file(const std::filesystem::path& path, absl::FunctionRef<void(const ByteSink& sink)> write) {
  const auto check = [&](const std::error_code& error) {
    if (error) throw std::system_error(error, "cannot write '" + path.string() + "'");
  };
  auto temporary = path;
  temporary += ".tmp";
  const int file = ::open(temporary.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0666);
  if (file < 0) check(last_error());
  const absl::Cleanup close = [&] { ::close(file); };
  const auto locked = lock(file, temporary);
  if (locked == std::errc::operation_would_block) {
    throw std::system_error(locked, "another writer is writing '" + path.string() + "'");
  }
  check(locked);
  // Removes the file while it is still locked, so that it cannot be another writer's.
  absl::Cleanup remove = [&] { ::unlink(temporary.c_str()); };
  if (::ftruncate(file, 0) != 0) check(last_error());
  write([&](const void* data, std::size_t size) { check(write_all(file, data, size)); });
  if (::fsync(file) != 0) check(last_error());
  if (::rename(temporary.c_str(), path.c_str()) != 0) check(last_error());
  std::move(remove).Cancel();
  check(flush_folder(path.parent_path()));
}

void write_safetensors(const Safetensors& content, const ByteSink& sink) {
  json header = json::object();
  json complex = json::array();
  std::vector<std::pair<std::string, at::Tensor>> tensors;
  for (const auto& [name, tensor] : content.tensors) {
    if (name == kMetadata) refuse("a tensor has the name '__metadata__', which the format keeps for texts; rename it");
    tensors.emplace_back(name, stored(name, tensor));
    if (tensor.scalar_type() == at::kComplexDouble) complex.push_back(name);
  }
  // Large elements first: each tensor is then aligned in the file.
  std::ranges::stable_sort(tensors, std::greater(), [](const auto& each) { return each.second.element_size(); });
  std::size_t end = 0;
  for (const auto& [name, tensor] : tensors) {
    const auto begin = std::exchange(end, end + tensor.nbytes());
    header[name] = {
        {"dtype", name_of(tensor.scalar_type())}, {"shape", tensor.sizes().vec()}, {"data_offsets", {begin, end}}};
  }
  auto& metadata = header[kMetadata];
  metadata = {{"checksum", kNoChecksum}, {"format", "pt"}};
  std::string text;
  try {
    if (!complex.empty()) metadata["complex128"] = complex.dump();
    if (!content.training.empty()) metadata["training"] = content.training;
    if (!content.model.empty()) metadata["model"] = content.model;
    text = header.dump();
  } catch (const json::type_error&) {
    refuse("a name or text is not UTF-8");
  }
  text.resize((text.size() + 7) / 8 * 8, ' ');
  if (text.size() > kMaxHeader) refuse("the names and texts take more than 100 MB");

  const std::uint64_t size = text.size();
  Checksum checksum;
  checksum.add(&size, sizeof size);
  checksum.add(text.data(), text.size());
  for (const auto& [name, tensor] : tensors) checksum.add(tensor.data_ptr(), tensor.nbytes());
  text.replace(text.find(kChecksumKey) + sizeof kChecksumKey - 1, kChecksumSize, checksum.text());
  sink(&size, sizeof size);
  sink(text.data(), text.size());
  for (const auto& [name, tensor] : tensors) sink(tensor.data_ptr(), tensor.nbytes());
}

void write_safetensors(const std::filesystem::path& path, const Safetensors& content) {
  replace_file(path, [&](const ByteSink& sink) { write_safetensors(content, sink); });
}

Safetensors read_safetensors(std::istream& from, std::uint64_t size) {
  std::uint64_t left = size;
  const auto read = [&](void* to, std::uint64_t bytes) {
    if (bytes > left || !from.read(static_cast<char*>(to), static_cast<std::streamsize>(bytes))) {
      refuse("the file is truncated");
    }
    left -= bytes;
  };
  std::uint64_t header_size = 0;
  read(&header_size, sizeof header_size);
  if (header_size > std::min(kMaxHeader, left)) refuse("the file is truncated, or not a safetensors file");
  std::string text(header_size, '\0');
  read(text.data(), text.size());
  const auto header = json_or_null(text);
  if (!header.is_object()) refuse("the file is not a safetensors file");
  const auto metadata = header.value(kMetadata, json::object());
  const auto metadata_text = [&](const char* key) {
    const auto found = metadata.is_object() ? metadata.find(key) : metadata.end();
    return found != metadata.end() && found->is_string() ? found->get<std::string>() : std::string();
  };

  Checksum checksum;
  checksum.add(&header_size, sizeof header_size);
  const auto place = text.find(kChecksumKey);
  if (place != text.npos && text.size() - place > sizeof kChecksumKey + kChecksumSize) {
    text.replace(place + sizeof kChecksumKey - 1, kChecksumSize, kNoChecksum);
  }
  checksum.add(text.data(), text.size());
  Safetensors content;
  content.training = metadata_text("training");
  content.model = metadata_text("model");
  for (const auto& entry : entries_of(header, left)) {
    auto tensor = at::empty(entry.shape, entry.type);
    read(tensor.data_ptr(), tensor.nbytes());
    checksum.add(tensor.data_ptr(), tensor.nbytes());
    content.tensors.emplace(entry.name, std::move(tensor));
  }
  const auto expected = metadata_text("checksum");
  const bool only_weights = content.training.empty() && content.model.empty();
  if (expected.empty() ? !only_weights : expected != checksum.text()) {
    refuse("the file is damaged: its checksum does not match");
  }
  const auto complex = json_or_null(metadata_text("complex128"));
  for (const auto& [name, tensor] : content.tensors) {
    if (!complex.is_array() || std::ranges::find(complex, json(name)) == complex.end()) continue;
    if (tensor.scalar_type() != at::kDouble || tensor.dim() == 0 || tensor.size(-1) != 2) {
      refuse("'" + name + "' is not stored as complex128");
    }
    content.tensors[name] = at::view_as_complex(tensor);
  }
  return content;
}

Safetensors read_safetensors(const std::filesystem::path& path) {
  const auto status = std::filesystem::status(path);  // opening a pipe would wait for a writer
  if (std::filesystem::is_directory(status)) throw std::system_error(EISDIR, std::generic_category());
  if (std::filesystem::exists(status) && !std::filesystem::is_regular_file(status)) refuse("not a regular file");
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::system_error(errno, std::generic_category());
  return read_safetensors(file, std::filesystem::file_size(path));
}

}  // namespace gpipe
