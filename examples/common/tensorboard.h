#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "examples/common/files.h"

namespace gpipe::examples {

/// A file that TensorBoard shows. Records come to it in the order of the calls; each is written with the time of its
/// call. They may stay in memory until flush() or the end of this. Not synchronised.
///
/// Errors are std::runtime_error that names the path and the reason.
class EventFile {
 public:
  /// Makes the directory where missing, and in it a new file: those of earlier runs stay, and TensorBoard shows their
  /// records before this one's.
  explicit EventFile(const std::filesystem::path& directory);

  void add_scalar(std::string_view tag, int64_t step, double value);
  /// `png` is the whole of a PNG file, see encode_png(); width and height are its pixels.
  void add_image(std::string_view tag, int64_t step, const std::vector<uint8_t>& png, int width, int height);
  void flush();

  const std::filesystem::path& path() const { return file_.path(); }

 private:
  void add_event(int64_t step, std::string_view content);
  void write_record(std::string_view data);

  OutputFile file_;
};

/// CRC-32C (Castagnoli), by which the file guards its records.
uint32_t crc32c(std::string_view data);

}  // namespace gpipe::examples
