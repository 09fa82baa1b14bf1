#pragma once

#include <cstddef>
#include <map>
#include <string>
#include <string_view>

namespace gpipe {

/// Records by name, without the folder that contains all of them.
using ZipRecords = std::map<std::string, std::string_view>;

/// Returns the records of a zip archive with uncompressed records, as torch.save writes it. The views are into `bytes`
/// and together no larger. Verifies every record's checksum, which torch's reader does not do.
///
/// Errors: std::runtime_error for any other, damaged or truncated archive.
ZipRecords zip_records(std::string_view bytes);

constexpr std::size_t kZipSignatureSize = 4;
constexpr std::size_t kZipEndSize = 22;

/// Checks the first kZipSignatureSize and the last kZipEndSize bytes of a file, as zip_records() does.
/// Errors: std::runtime_error.
void check_zip_ends(std::string_view begin, std::string_view end);

}  // namespace gpipe
