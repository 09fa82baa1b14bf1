#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

namespace gpipe {

/// Buffers that several stages share, such as tables of positions. Stages run at once, so none may write to them. Used
/// by one thread at a time.
class SharedBuffers {
 public:
  /// `what` names the buffer and its stages for messages.
  void add(const at::Tensor& buffer, std::string what);

  /// Notes the buffers before a forward. The first one with gradients is watched closely: values are compared too.
  void before_forward(bool grad);
  /// Errors: std::runtime_error when a buffer was written to since.
  void after_forward();

 private:
  struct Shared {
    at::Tensor buffer;
    std::string what;
    std::uint32_t version = 0;
    at::Tensor copy = {};  ///< while the values are watched
  };
  std::vector<Shared> shared_;
  bool watched_ = false;
};

}  // namespace gpipe
