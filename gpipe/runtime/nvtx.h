#pragma once

#include <string>

namespace gpipe {

// Ranges for NVIDIA Nsight Systems. CMake compiles nvtx.cpp where it finds NVTX 3, which the CUDA Toolkit has, else
// no_nvtx.cpp. Thread-safe.

/// Whether a tool records ranges.
bool nvtx_listens();
/// Begins a range on this thread, inside those that have begun. REQUIRES: nvtx_listens().
void nvtx_push(const std::string& name);
/// Ends the range of this thread that began last.
void nvtx_pop();

}  // namespace gpipe
