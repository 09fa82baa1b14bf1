#pragma once

#include <ATen/record_function.h>

#include "absl/functional/function_ref.h"
#include "gpipe/runtime/nvtx.h"

namespace gpipe {

/// Shows its lifetime, on one thread, as a range in PyTorch's profilers and Nsight Systems, if one listens.
class ProfilerRange {
 public:
  explicit ProfilerRange(absl::FunctionRef<std::string()> name) : range_(at::RecordScope::USER_SCOPE) {
    if (!range_.isActive() && !nvtx_) return;
    const auto text = name();
    if (range_.isActive()) range_.before(text);
    if (nvtx_) nvtx_push(text);
  }
  ~ProfilerRange() {
    if (nvtx_) nvtx_pop();
  }
  ProfilerRange(const ProfilerRange&) = delete;

 private:
  at::RecordFunction range_;
  const bool nvtx_ = nvtx_listens();
};

}  // namespace gpipe
