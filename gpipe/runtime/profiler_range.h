#pragma once

#include <ATen/record_function.h>

#include <string>

#include "absl/functional/function_ref.h"

namespace gpipe {

/// Shows its lifetime as a range in PyTorch's profilers. Calls `name` only if one listens. Begin and end it on one thread.
class ProfilerRange {
 public:
  explicit ProfilerRange(absl::FunctionRef<std::string()> name) : range_(at::RecordScope::USER_SCOPE) {
    if (range_.isActive()) range_.before(name());
  }

 private:
  at::RecordFunction range_;
};

}  // namespace gpipe
