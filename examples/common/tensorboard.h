#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "examples/common/files.h"

namespace gpipe::examples {

/// A file that TensorBoard shows. Records are written in the order of the calls, each with the time of its call. They
/// can stay in memory until flush() or the destructor. Not synchronised.
///
/// Errors: std::runtime_error with the path and the reason.
class EventFile {
 public:
  /// Creates the folder if it is missing, and a new file in it. Files of earlier runs stay; TensorBoard shows their records
  /// first.
  explicit EventFile(const std::filesystem::path& folder);

  void add_scalar(std::string_view tag, int64_t step, double value);
  /// `png` is a whole PNG file, see encode_png(). Width and height are in pixels.
  void add_image(std::string_view tag, int64_t step, const std::vector<uint8_t>& png, int width, int height);
  void flush();

  const std::filesystem::path& path() const { return file_.path(); }

 private:
  void add_event(int64_t step, std::string_view content);
  void write_record(std::string_view data);

  OutputFile file_;
};

/// Whether a file of this name was written by an EventFile, or by the training programs in Python.
bool is_event_file(std::string_view name);

/// Cuts the folder's event files before the first record that is damaged or that `keeps` refuses, by its tag and step. Removes
/// files that keep no record. REQUIRES: No EventFile of the folder is open.
/// Errors: std::runtime_error with the path and the reason.
void cut_event_files(const std::filesystem::path& folder,
                     const std::function<bool(std::string_view tag, int64_t step)>& keeps);

/// CRC-32C (Castagnoli), the checksum of records.
uint32_t crc32c(std::string_view data);

}  // namespace gpipe::examples
