#pragma once

#include <torch/types.h>

#include <vector>

namespace gpipe::examples {

/// During its lifetime, this thread's operators on these kinds of devices compute in bfloat16 where that is safe.
/// bfloat16 has the range of float, so the loss needs no scaling.
class Autocast {
 public:
  /// Does nothing unless `enabled`.
  Autocast(bool enabled, const std::vector<torch::Device>& devices);
  ~Autocast();
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;

 private:
  struct Previous {
    torch::DeviceType type;
    bool enabled;
    torch::Dtype dtype;
  };
  std::vector<Previous> previous_;
};

}  // namespace gpipe::examples
