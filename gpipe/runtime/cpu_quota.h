#pragma once

#include <functional>
#include <optional>
#include <string>

namespace gpipe {

/// Returns the file's text, or std::nullopt if the file does not exist.
using ReadFile = std::function<std::optional<std::string>(const std::string& path)>;

/// Returns the CPU time that control groups, of version 1 or 2, allow this process, in CPUs: 1.5 means 1.5 seconds of
/// CPU time per second. Takes the minimum over the process's group and its ancestors. Missing and malformed files count
/// as no limit, which is infinity. Thread-safe.
double cpu_quota();

/// The same, but reads files with `read`.
double cpu_quota(const ReadFile& read);

}  // namespace gpipe
