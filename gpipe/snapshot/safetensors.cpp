#include "gpipe/snapshot/safetensors.h"

#include <ATen/ops/empty.h>
#include <zlib.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <fstream>
#include <sstream>
#include <system_error>

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
constexpr char kNoChecksum[] = "00000000";
constexpr std::size_t kChecksumSize = sizeof kNoChecksum - 1;
constexpr std::uint64_t kMaxHeader = 100'000'000;  // the limit of the format's first implementation

[[noreturn]] void refuse(const std::string& what) { throw_error(what); }

/// A CRC-32 of bytes in order.
class Checksum {
 public:
  Checksum& add(const void* data, std::size_t size) {
    if (size > 0) value_ = crc32_z(value_, static_cast<const Bytef*>(data), size);  // no data would restart the sum
    return *this;
  }
  /// Returns eight hexadecimal digits.
  std::string text() const { return absl::StrFormat("%08x", value_); }

 private:
  uLong value_ = 0;
};

/// Replaces a checksum in a header by another text of its size. Returns false if there is none.
bool put_checksum(std::string& header, const std::string& key, const std::string& checksum) {
  const auto begin = "\"" + key + "\":\"";  // a quote within a text is escaped
  const auto place = header.find(begin);
  if (place == header.npos || header.size() - place <= begin.size() + kChecksumSize) return false;
  header.replace(place + begin.size(), kChecksumSize, checksum);
  return true;
}

/// Returns the checksum of the bytes before the tensors.
Checksum checksum_of(const std::string& header) {
  const std::uint64_t size = header.size();
  return Checksum().add(&size, sizeof size).add(header.data(), header.size());
}

void check_storable(const std::string& name, const at::Tensor& tensor) {
  if (!tensor.defined()) refuse_argument("tensor '", name, "' is undefined and cannot be saved");
  const bool has_type = std::ranges::any_of(kTypes, [&](auto& type) { return type.second == tensor.scalar_type(); });
  if (tensor.layout() == at::kStrided && !tensor.is_meta() && has_type) return;
  std::ostringstream what;
  what << "tensor '" << name << "' of type " << tensor.scalar_type() << " and layout " << tensor.layout() << " on "
       << tensor.device() << " cannot be saved: a file holds dense tensors of the types that safetensors has";
  refuse_argument(what.str());
}

/// Returns the tensor's values, dense on the CPU.
at::Tensor stored(const at::Tensor& tensor) { return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous(); }

/// Returns the number of bytes. Errors: std::runtime_error if it has more than 63 bits.
std::uint64_t bytes_of(const std::string& name, at::ScalarType type, const std::vector<std::int64_t>& shape) {
  // Strides ignore sizes of zero.
  std::int64_t strided = static_cast<std::int64_t>(c10::elementSize(type));
  bool empty = false;
  for (const auto size : shape) {
    if (size < 0 || __builtin_mul_overflow(strided, std::max<std::int64_t>(size, 1), &strided)) {
      refuse("the shape of '" + name + "' is out of range");
    }
    empty = empty || size == 0;
  }
  return empty ? 0 : static_cast<std::uint64_t>(strided);
}

}  // namespace

std::string write_safetensors(const Safetensors& content, const ByteSink& sink) {
  json header = json::object();
  json checksums = json::object();
  std::vector<std::pair<std::string, at::Tensor>> tensors;
  for (const auto& [name, tensor] : content.tensors) {
    if (name == kMetadata) refuse("a tensor has the name '__metadata__', which the format keeps for texts; rename it");
    check_storable(name, tensor);
    tensors.emplace_back(name, tensor);
  }
  // Large elements first: each tensor is then aligned in the file.
  std::ranges::stable_sort(tensors, std::greater(), [](const auto& each) { return each.second.element_size(); });
  std::size_t end = 0;
  for (const auto& [name, tensor] : tensors) {
    const auto values = stored(tensor);  // not kept: there may be no memory for copies of all
    const auto begin = std::exchange(end, end + values.nbytes());
    const auto* type = std::ranges::find(kTypes, values.scalar_type(), [](auto& each) { return each.second; })->first;
    header[name] = {{"dtype", type}, {"shape", values.sizes().vec()}, {"data_offsets", {begin, end}}};
    checksums[name] = Checksum().add(values.const_data_ptr(), values.nbytes()).text();
  }
  std::string text;
  try {
    header[kMetadata] = {{"format", "pt"}, {"header_crc32", kNoChecksum}, {"tensor_crc32", checksums.dump()}};
    if (!content.model.empty()) header[kMetadata]["model"] = content.model;
    text = header.dump();
  } catch (const json::type_error&) {
    refuse("a name or text is not UTF-8");
  }
  text.resize((text.size() + 7) / 8 * 8, ' ');
  if (text.size() > kMaxHeader) refuse("the names and texts take more than 100 MB");
  const auto checksum = checksum_of(text).text();
  put_checksum(text, "header_crc32", checksum);
  const std::uint64_t size = text.size();
  sink(&size, sizeof size);
  sink(text.data(), text.size());
  for (const auto& [name, tensor] : tensors) {
    const auto values = stored(tensor);
    sink(values.const_data_ptr(), values.nbytes());
  }
  return checksum;
}

std::string write_safetensors(const std::filesystem::path& path, const Safetensors& content) {
  std::string checksum;
  replace_file(path, [&](const ByteSink& sink) { checksum = write_safetensors(content, sink); });
  return checksum;
}

SafetensorsFile::SafetensorsFile(const std::filesystem::path& path)
    : SafetensorsFile(
          [&] {
            const auto status = std::filesystem::status(path);  // opening a pipe would wait for a writer
            if (std::filesystem::is_directory(status)) throw std::system_error(EISDIR, std::generic_category());
            if (std::filesystem::exists(status) && !std::filesystem::is_regular_file(status)) {
              refuse("not a regular file");
            }
            errno = 0;
            auto file = std::make_unique<std::ifstream>(path, std::ios::binary);
            if (!*file) throw std::system_error(errno, std::generic_category());
            return file;
          }(),
          std::filesystem::file_size(path)) {}

SafetensorsFile::SafetensorsFile(std::unique_ptr<std::istream> from, std::uint64_t size)
    : from_(std::move(from)), size_(size) {
  std::uint64_t header_size = 0;
  if (size < sizeof header_size || !from_->read(reinterpret_cast<char*>(&header_size), sizeof header_size)) {
    refuse("the file is truncated");
  }
  begin_ = sizeof header_size + header_size;
  if (header_size > std::min(kMaxHeader, size - sizeof header_size)) {
    refuse("the file is truncated, or not a safetensors file");
  }
  std::string header(header_size, '\0');
  if (!from_->read(header.data(), static_cast<std::streamsize>(header.size()))) refuse("the file is truncated");
  read_entries(header);
  if (const auto expected = text("header_crc32"); !expected.empty()) {
    if (!put_checksum(header, "header_crc32", kNoChecksum) || checksum_of(header).text() != expected) {
      refuse("the file is damaged: the checksum of its header does not match");
    }
  } else if (!text("model").empty()) {
    refuse("the file is damaged: it has no checksum");
  }
}

void SafetensorsFile::read_entries(const std::string& text_of_header) {
  const auto header = json_or_null(text_of_header);
  if (!header.is_object()) refuse("the file is not a safetensors file");
  const auto metadata = header.value(kMetadata, json::object());
  for (const auto& [key, value] : metadata.items()) {
    if (value.is_string()) texts_[key] = value.get<std::string>();
  }
  const auto checksums = json_or_null(text("tensor_crc32"));
  for (const auto& [name, from] : header.items()) {
    if (name == kMetadata) continue;
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
      const auto checksum = checksums.is_object() ? checksums.at(name).get<std::string>() : "";
      const auto shape = from.at("shape").get<std::vector<std::int64_t>>();
      entries_[name] = {type->second, shape, offsets[0], offsets[1], checksum};
    } catch (const json::exception&) {
      refuse("'" + name + "' is not described as a tensor");
    }
  }
  std::vector<std::pair<std::string, const Entry*>> in_order;
  for (const auto& [name, entry] : entries_) in_order.emplace_back(name, &entry);
  std::ranges::sort(in_order, {}, [](const auto& each) { return std::pair(each.second->begin, each.second->end); });
  std::uint64_t end = 0;
  for (const auto& [name, entry] : in_order) {
    const auto bytes = bytes_of(name, entry->type, entry->shape);
    if (entry->begin != end || entry->end < end || entry->end > size_ - begin_ || entry->end - end != bytes) {
      refuse("the place of '" + name + "' does not fit its shape or the file");
    }
    end = entry->end;
  }
  if (end != size_ - begin_) refuse(std::to_string(size_ - begin_ - end) + " bytes belong to no tensor");
}

std::vector<std::string> SafetensorsFile::names() const {
  std::vector<std::string> names;
  for (const auto& [name, entry] : entries_) names.push_back(name);
  return names;
}

at::Tensor SafetensorsFile::without_data(const std::string& name) const {
  const auto& entry = entries_.at(name);
  return at::empty(entry.shape, at::device(at::kMeta).dtype(entry.type));
}

at::Tensor SafetensorsFile::read(const std::string& name) {
  const auto& entry = entries_.at(name);
  auto tensor = at::empty(entry.shape, entry.type);
  from_->clear();
  from_->seekg(static_cast<std::streamoff>(begin_ + entry.begin));
  if (!from_->read(static_cast<char*>(tensor.data_ptr()), static_cast<std::streamsize>(tensor.nbytes()))) {
    refuse("the file is truncated");
  }
  if (!entry.checksum.empty() && Checksum().add(tensor.data_ptr(), tensor.nbytes()).text() != entry.checksum) {
    refuse("the file is damaged: the checksum of '" + name + "' does not match");
  }
  return tensor;
}

std::string SafetensorsFile::text(const std::string& key) const {
  const auto found = texts_.find(key);
  return found == texts_.end() ? "" : found->second;
}

Safetensors read_safetensors(const std::filesystem::path& path) {
  SafetensorsFile file(path);
  Safetensors content{.tensors = {}, .model = file.text("model")};
  for (const auto& name : file.names()) content.tensors.emplace(name, file.read(name));
  return content;
}

}  // namespace gpipe
