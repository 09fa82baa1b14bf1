#pragma once

#include <functional>
#include <optional>
#include <string>

namespace gpipe {

/// The text of a file; none when there is no such file.
using ReadFile = std::function<std::optional<std::string>(const std::string& path)>;

/// The CPU time that control groups allow this process, in CPUs: 1.5 is three seconds in two. Infinity where nothing
/// limits it. The least of what the process's group and the groups around it allow, in version 2 (cpu.max) and in
/// version 1 (cpu.cfs_quota_us and cpu.cfs_period_us). Files that are absent or odd limit nothing. Thread-safe.
double cpu_quota();

/// The same, of the files that `read` knows.
double cpu_quota(const ReadFile& read);

}  // namespace gpipe
