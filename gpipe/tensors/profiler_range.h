#pragma once

#include <ATen/record_function.h>

#include "absl/functional/function_ref.h"

namespace gpipe {

/// Shows its lifetime, on one thread, as a range in PyTorch's profilers and Nsight Systems, if one listens.
class ProfilerRange {
 public:
  explicit ProfilerRange(absl::FunctionRef<std::string()> name);
  ~ProfilerRange();
  ProfilerRange(const ProfilerRange&) = delete;

 private:
  at::RecordFunction range_;
  const bool nvtx_;  // whether Nsight Systems listens
};

}  // namespace gpipe
