#include "gpipe/snapshot/zip_records.h"

#include <zlib.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <stdexcept>

namespace gpipe {
namespace {

// Signatures and layouts follow the format's specification, APPNOTE.TXT, sections 4.3.7 to 4.3.16 and 4.5.3.
constexpr std::uint32_t kLocalHeader = 0x04034b50;
constexpr std::uint32_t kCentralHeader = 0x02014b50;
constexpr std::uint32_t kEnd = 0x06054b50;
constexpr std::uint32_t kEnd64Locator = 0x07064b50;
constexpr std::uint32_t kEnd64 = 0x06064b50;
constexpr std::uint16_t kExtra64 = 1;
constexpr std::uint32_t kIn64 = 0xffffffff;  ///< in a 32-bit field: the value is in the 64-bit extra field

[[noreturn]] void damaged(const std::string& what) {
  throw std::runtime_error("the file is damaged or truncated: " + what);
}

std::string_view part(std::string_view bytes, std::uint64_t begin, std::uint64_t size) {
  if (begin > bytes.size() || size > bytes.size() - begin) damaged("a record lies outside the file");
  return bytes.substr(begin, size);
}

/// A little-endian number.
template <class Number>
Number number(std::string_view bytes, std::uint64_t at) {
  const auto field = part(bytes, at, sizeof(Number));
  std::uint64_t value = 0;
  for (std::size_t i = sizeof(Number); i-- > 0;) value = value << 8 | static_cast<unsigned char>(field[i]);
  return static_cast<Number>(value);
}

struct Directory {
  std::uint64_t begin;
  std::uint64_t entries;
};

Directory find_directory(std::string_view bytes) {
  constexpr std::size_t kLocatorSize = 20;
  const auto end = bytes.size() - kZipEndSize;
  if (end >= kLocatorSize && number<std::uint32_t>(bytes, end - kLocatorSize) == kEnd64Locator) {
    const auto end64 = number<std::uint64_t>(bytes, end - kLocatorSize + 8);
    if (number<std::uint32_t>(bytes, end64) != kEnd64) damaged("its directory is not at the given offset");
    return {number<std::uint64_t>(bytes, end64 + 48), number<std::uint64_t>(bytes, end64 + 32)};
  }
  return {number<std::uint32_t>(bytes, end + 16), number<std::uint16_t>(bytes, end + 10)};
}

/// Replaces the numbers that are stored in the 64-bit extra field. The field has them in the order of the parameters.
void read_extra64(std::string_view extra, std::uint64_t& size, std::uint64_t& packed_size, std::uint64_t& begin) {
  for (std::uint64_t at = 0; at + 4 <= extra.size();) {
    const auto field = part(extra, at + 4, number<std::uint16_t>(extra, at + 2));
    if (number<std::uint16_t>(extra, at) == kExtra64) {
      std::uint64_t next = 0;
      for (auto* value : {&size, &packed_size, &begin}) {
        if (*value != kIn64) continue;
        *value = number<std::uint64_t>(field, next);
        next += 8;
      }
    }
    at += 4 + field.size();
  }
}

std::uint32_t checksum(std::string_view data) {
  return crc32_z(0, reinterpret_cast<const Bytef*>(data.data()), data.size());
}

}  // namespace

void check_zip_ends(std::string_view begin, std::string_view end) {
  if (begin != "PK\3\4") throw std::runtime_error("the file is not a zip archive");
  if (end.size() != kZipEndSize || number<std::uint32_t>(end, 0) != kEnd) damaged("it has no end-of-archive record");
}

ZipRecords zip_records(std::string_view bytes) {
  check_zip_ends(bytes.substr(0, kZipSignatureSize), bytes.substr(bytes.size() - std::min(bytes.size(), kZipEndSize)));
  const auto directory = find_directory(bytes);
  ZipRecords records;
  std::uint64_t left = bytes.size();
  std::string_view folder;
  auto at = directory.begin;
  for (std::uint64_t i = 0; i < directory.entries; ++i) {
    if (number<std::uint32_t>(bytes, at) != kCentralHeader) damaged("its directory is broken");
    const auto flags = number<std::uint16_t>(bytes, at + 8);
    const auto method = number<std::uint16_t>(bytes, at + 10);
    const auto crc = number<std::uint32_t>(bytes, at + 16);
    std::uint64_t packed_size = number<std::uint32_t>(bytes, at + 20);
    std::uint64_t size = number<std::uint32_t>(bytes, at + 24);
    const auto name_size = number<std::uint16_t>(bytes, at + 28);
    const auto extra_size = number<std::uint16_t>(bytes, at + 30);
    const auto comment_size = number<std::uint16_t>(bytes, at + 32);
    std::uint64_t local = number<std::uint32_t>(bytes, at + 42);
    const auto name = part(bytes, at + 46, name_size);
    read_extra64(part(bytes, at + 46 + name_size, extra_size), size, packed_size, local);
    at += 46 + name_size + extra_size + comment_size;

    if (method != 0 || size != packed_size || (flags & 1) != 0) {
      throw std::runtime_error("the file has compressed records, as TorchScript files do, or encrypted ones");
    }
    if (i == 0) folder = name.substr(0, name.find('/') + 1);
    if (folder.empty() || name.substr(0, folder.size()) != folder) damaged("its records are in different folders");
    if (number<std::uint32_t>(bytes, local) != kLocalHeader || number<std::uint16_t>(bytes, local + 26) != name_size ||
        part(bytes, local + 30, name_size) != name) {
      damaged("a record is not at the offset in the directory");
    }
    const auto data = part(bytes, local + 30 + name_size + number<std::uint16_t>(bytes, local + 28), size);
    if (size > left) damaged("its records overlap");
    left -= size;
    if (checksum(data) != crc) damaged("the checksum of '" + std::string(name) + "' is wrong");
    if (!records.emplace(name.substr(folder.size()), data).second) damaged("a record occurs twice");
  }
  return records;
}

}  // namespace gpipe
