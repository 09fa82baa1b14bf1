#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <istream>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "gpipe/snapshot/files.h"

namespace gpipe {

/// The content of a file in the safetensors format, https://huggingface.co/docs/safetensors.
///
/// The file is the size of a header (8 bytes, little endian), the header, and the tensors' bytes without gaps. The
/// header is a JSON object with each tensor's dtype, shape and place, and texts under "__metadata__". This library
/// writes these texts: "tensor_crc32", the CRC-32 of each tensor's bytes; "header_crc32", the CRC-32 of the bytes before
/// the tensors, with eight zeros in its place; `model`.
struct Safetensors {
  std::map<std::string, at::Tensor> tensors;
  std::string model;  ///< of a model file, else empty
};

/// Passes the bytes of the file to `sink`, in order. Returns the checksum of the header, which has the checksums
/// of the tensors. Equal contents give equal bytes. Errors: std::invalid_argument for a tensor that is undefined, not dense or
/// of a dtype that the format lacks; std::runtime_error for text that is not UTF-8.
std::string write_safetensors(const Safetensors& content, const ByteSink& sink);

/// Replaces the file. Errors: as above, and those of replace_file().
std::string write_safetensors(const std::filesystem::path& path, const Safetensors& content);

/// A file in the format, of which tensors are read one by one. Errors: std::runtime_error for bytes that are not of the
/// format, or do not have the checksum, which only a file of weights may lack.
class SafetensorsFile {
 public:
  /// Reads a file. Errors: also std::system_error for a file that cannot be opened or is a directory.
  explicit SafetensorsFile(const std::filesystem::path& path);
  /// Reads `size` bytes.
  SafetensorsFile(std::unique_ptr<std::istream> from, std::uint64_t size);

  std::vector<std::string> names() const;
  bool contains(const std::string& name) const { return entries_.contains(name); }
  /// Returns a tensor of names(). Allocates no more than its part of the file.
  at::Tensor read(const std::string& name);
  /// Returns a tensor of its type and shape on the meta device. Reads nothing.
  at::Tensor without_data(const std::string& name) const;
  /// Returns a text under "__metadata__", or an empty one.
  std::string text(const std::string& key) const;

 private:
  struct Entry {
    at::ScalarType type;
    std::vector<std::int64_t> shape;
    std::uint64_t begin;
    std::uint64_t end;
    std::string checksum;  ///< empty if the file has none
  };
  void read_entries(const std::string& header);

  std::unique_ptr<std::istream> from_;
  const std::uint64_t size_;
  std::uint64_t begin_ = 0;  // of the tensors
  std::map<std::string, std::string> texts_;
  std::map<std::string, Entry> entries_;
};

/// Reads all of a file. Errors: as above.
Safetensors read_safetensors(const std::filesystem::path& path);

}  // namespace gpipe
