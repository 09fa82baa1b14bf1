#pragma once

#include <map>
#include <string>
#include <string_view>

namespace gpipe {

/// The records of a zip file that holds them uncompressed, as torch.save writes them, by name without the folder that
/// all of them are in. The views are into `bytes`.
///
/// Every record's checksum is verified. torch's own reader does not do that, and takes a flipped bit for a weight.
///
/// Errors: std::runtime_error for anything else, damaged or cut short.
std::map<std::string, std::string_view> zip_records(std::string_view bytes);

}  // namespace gpipe
