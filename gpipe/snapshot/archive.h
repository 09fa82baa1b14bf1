#pragma once

#include <ATen/core/ivalue.h>

#include <filesystem>

#include "gpipe/snapshot/plain.h"

namespace gpipe {

/// A file of plain values in the form of torch.save: a zip file with a pickle of dicts, lists, tuples, tensors, strings
/// and numbers. Python's torch.load reads it with weights_only=True, C++ by torch::pickle_load.
///
/// Tensors are saved from the CPU, without gradients, and each with no more of its storage than it shows.

/// The same value as it is to be written. Errors: std::runtime_error, without the path, for what could not be read.
c10::IValue saveable(const c10::IValue& value);

/// Replaces the file (see AtomicFile) by one with a value of saveable(). Errors: std::runtime_error with the path and
/// the reason.
void write_archive(const std::filesystem::path& path, const c10::IValue& value);

/// What such a file holds, on the CPU, after a check of every byte that matters. Reading executes nothing: the pickle
/// can only make plain values. Errors, without the path: std::system_error where the file cannot be read, and
/// std::runtime_error for what is not a regular file, or is damaged.
Plain read_archive(const std::filesystem::path& path);

}  // namespace gpipe
