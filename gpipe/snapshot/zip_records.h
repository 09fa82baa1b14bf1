#pragma once

#include <cstddef>
#include <map>
#include <string>
#include <string_view>

namespace gpipe {

/// Records by name, without the folder that contains all of them.
using ZipRecords = std::map<std::string, std::string_view>;

/// Returns the records of a zip archive without compression, as torch.save writes it. The views point into `bytes`, and
/// their sizes add up to at most its size. Verifies the checksum of every record.
///
/// Errors: std::runtime_error for other files, and for damaged or truncated archives.
ZipRecords zip_records(std::string_view bytes);

constexpr std::size_t kZipSignatureSize = 4;  ///< bytes
constexpr std::size_t kZipEndSize = 22;       ///< bytes

/// Checks the first kZipSignatureSize and the last kZipEndSize bytes of a file, as zip_records() does.
/// Errors: std::runtime_error.
void check_zip_ends(std::string_view begin, std::string_view end);

}  // namespace gpipe
