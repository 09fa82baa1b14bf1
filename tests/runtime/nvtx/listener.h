#pragma once

#include <string>
#include <vector>

// A tool that records NVTX ranges. NVTX loads this library if NVTX_INJECTION64_PATH has its path.
namespace gpipe::nvtx {

/// Returns the ranges so far, as "domain: name", each after those around it: "outer > inner". Thread-safe.
std::vector<std::string> ranges();

/// Returns the number of ranges that have not ended. Thread-safe.
int open_ranges();

}  // namespace gpipe::nvtx
