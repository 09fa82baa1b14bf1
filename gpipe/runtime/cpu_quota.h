#pragma once

#include <functional>
#include <optional>
#include <string>

namespace gpipe {

/// Returns the file's text, or std::nullopt if the file does not exist.
using ReadFile = std::function<std::optional<std::string>(const std::string& path)>;

/// Returns the CPU time that control groups allow this process, in CPUs: 1.5 means 1.5 seconds of CPU time per second.
/// Infinity means no limit. The result is the minimum over the process's group and its ancestors, for control groups
/// version 2 (cpu.max) and version 1 (cpu.cfs_quota_us, cpu.cfs_period_us). Missing and malformed files count as no
/// limit. Thread-safe.
double cpu_quota();

/// The same, but reads files with `read`.
double cpu_quota(const ReadFile& read);

}  // namespace gpipe
