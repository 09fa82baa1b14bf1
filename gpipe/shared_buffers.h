#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

namespace gpipe {

/// Detects writes to buffers that several stages share, such as tables of positions. Stages run concurrently, so none may
/// write to them. Used by one thread at a time.
class SharedBuffers {
 public:
  /// `what` names the buffer and its stages in messages.
  void add(const at::Tensor& buffer, std::string what);

  /// Records the buffers' versions and, at the first forward with gradients, their values.
  void before_forward(bool grad);
  /// Errors: std::runtime_error when a buffer was written to since before_forward().
  void after_forward();

 private:
  struct Shared {
    at::Tensor buffer;
    std::string what;
    std::uint32_t version = 0;
    at::Tensor copy = {};  ///< defined while values are compared
  };
  std::vector<Shared> shared_;
  bool watched_ = false;
};

}  // namespace gpipe
