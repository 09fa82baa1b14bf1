#pragma once

#include <ATen/core/ivalue.h>

#include <filesystem>

namespace gpipe {

/// A file of plain values in the form of torch.save: a zip file with a pickle of dicts, lists, tuples, tensors, strings
/// and numbers. Python's torch.load reads it with weights_only=True, C++ by torch::pickle_load.
///
/// Tensors are saved from the CPU, without gradients, and each with no more of its storage than it shows.

/// Replaces the file at once or not at all (see AtomicFile). Errors: std::runtime_error with the path and the reason.
void write_archive(const std::filesystem::path& path, const c10::IValue& value);

/// What such a file holds, on the CPU, after a check of every byte that matters. Reading executes nothing: the pickle
/// can only make plain values. Errors: std::runtime_error with the reason, without the path.
c10::IValue read_archive(const std::filesystem::path& path);

}  // namespace gpipe
