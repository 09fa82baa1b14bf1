#pragma once

#include <ATen/core/ivalue.h>

#include <filesystem>
#include <string>
#include <string_view>

#include "gpipe/snapshot/plain.h"

namespace gpipe {

// An archive is a file in the format of torch.save: a zip archive with a pickle of dicts, lists, tuples, tensors,
// strings and numbers. Python reads it with torch.load(weights_only=True), LibTorch with torch::pickle_load.

/// Converts a value to the form in which it is written: tensors are on the CPU and detached, and each has only the part
/// of its storage that it uses.
/// Errors: std::runtime_error, without the path, for a value that read_archive() could not read.
c10::IValue saveable(const c10::IValue& value);

/// Writes a value from saveable() to a file, atomically (see AtomicFile).
/// Errors: std::runtime_error with the path and the reason.
void write_archive(const std::filesystem::path& path, const c10::IValue& value);

/// Returns the bytes of the file that write_archive() writes.
std::string to_archive(const c10::IValue& value);

/// Reads an archive into CPU tensors and other plain values. Verifies all checksums and bounds. Executes nothing from
/// the file.
/// Errors, without the path: std::system_error if the file cannot be read; std::runtime_error if it is not a regular
/// file, not an archive, or damaged.
Plain read_archive(const std::filesystem::path& path);

/// The same for the bytes of a file. Errors: std::runtime_error.
Plain from_archive(std::string_view bytes);

}  // namespace gpipe
