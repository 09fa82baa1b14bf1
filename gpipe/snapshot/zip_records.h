#pragma once

#include <cstddef>
#include <map>
#include <string>
#include <string_view>

namespace gpipe {

/// By name, without the folder that all of them are in.
using ZipRecords = std::map<std::string, std::string_view>;

/// The records of a zip file that holds them uncompressed, as torch.save writes them. The views are into `bytes`, and
/// together no larger.
///
/// Verifies every record's checksum. torch's own reader does not do that, and takes a flipped bit for a weight.
///
/// Errors: std::runtime_error for anything else, damaged or cut short.
ZipRecords zip_records(std::string_view bytes);

constexpr std::size_t kZipSignatureSize = 4;
constexpr std::size_t kZipEndSize = 22;

/// A part of that check: whether a file begins and ends as zip_records() wants it. `begin` and `end` are its first
/// kZipSignatureSize and last kZipEndSize bytes. Errors: std::runtime_error.
void check_zip_ends(std::string_view begin, std::string_view end);

}  // namespace gpipe
