#pragma once

#include <functional>
#include <istream>

#include "absl/functional/function_ref.h"
#include "gpipe/snapshot.h"

namespace gpipe {

/// The content of a file in the safetensors format, https://huggingface.co/docs/safetensors.
///
/// The file is the size of a header (8 bytes, little endian), the header, and the tensors' bytes without gaps. The
/// header is a JSON object with each tensor's dtype, shape and place, and texts under "__metadata__". This library
/// writes these texts: "checksum", the CRC-32 of the whole file with eight zeros in the place of the checksum;
/// "complex128", a list of the tensors of that type, which the format lacks and which are stored as pairs of float64;
/// `training` and `model`.
struct Safetensors {
  std::map<std::string, at::Tensor> tensors;
  std::string training;  ///< empty in a file of weights only
  std::string model;     ///< of a model file, else empty
};

using ByteSink = std::function<void(const void* data, std::size_t size)>;

/// Replaces a file atomically by the bytes that `write` passes to its argument: the path always names a complete file.
/// The bytes go to a temporary file, the path with ".tmp" appended, which is flushed to the disk and renamed. Then the
/// folder is flushed. A failure before the rename, including a power cut, leaves the previous file unchanged.
///
/// Overwrites a temporary file left by a killed process, and removes its own after an error. Errors: those of `write`;
/// std::system_error with the path and the reason; operation_would_block for another writer of the path, in this
/// process or another. After an error the path names the previous file, unless only flushing the folder failed.
void replace_file(const std::filesystem::path& path, absl::FunctionRef<void(const ByteSink& sink)> write);

/// Passes the bytes of the file to `sink`, in order. Equal contents give equal bytes. Errors: std::runtime_error for a
/// tensor that is undefined, not dense or of a dtype that the format lacks, and for text that is not UTF-8.
void write_safetensors(const Safetensors& content, const ByteSink& sink);

/// Replaces the file. Errors: as above, and those of replace_file().
void write_safetensors(const std::filesystem::path& path, const Safetensors& content);

/// Reads `size` bytes. Allocates no more than that for tensors. Errors: std::runtime_error for bytes that are not of
/// the format, or do not have the checksum, which only a file of weights may lack.
Safetensors read_safetensors(std::istream& from, std::uint64_t size);

/// Reads a file. Errors: as above; std::system_error for a file that cannot be opened or is a directory.
Safetensors read_safetensors(const std::filesystem::path& path);

/// Returns the content of a snapshot's file: the model's tensors by their names, the other tensors and the history by
/// names that begin with a dot, and the rest as JSON. Errors: std::runtime_error for what JSON cannot hold.
Safetensors to_safetensors(const Snapshot& snapshot);

/// Errors: std::runtime_error if `file` is not of a snapshot, or of a newer version.
Snapshot from_safetensors(Safetensors file);

}  // namespace gpipe
