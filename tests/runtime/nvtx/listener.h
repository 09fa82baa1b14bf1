#pragma once

#include <string>
#include <vector>

// A tool that records NVTX ranges. NVTX loads this library if NVTX_INJECTION64_PATH has its path.
namespace gpipe::nvtx {

/// Returns the ranges that have ended, as "domain: name", each after those around it: "outer > inner". Thread-safe.
std::vector<std::string> ended_ranges();

}  // namespace gpipe::nvtx
