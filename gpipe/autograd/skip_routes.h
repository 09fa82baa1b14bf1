#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/edge.h>

#include <map>

#include "gpipe/autograd/stage.h"

namespace gpipe {

/// Connects stash() and pop() during one run of a cell's layers: with the skips that leave and enter the stage, and with
/// each other for a skip inside the stage. Used by one thread.
class SkipRoutes : public SkipContext {
 public:
  /// `entering[k]` is the tensor of the stage's k-th skip in. `stage` must outlive this.
  SkipRoutes(const Stage& stage, std::vector<at::Tensor> entering);

  /// Errors of both: std::runtime_error for a second stash or pop, a pop before the stash, or a change between them.
  void stash(const SkipKey& key, at::Tensor tensor) override;
  at::Tensor pop(const SkipKey& key) override;

  /// Call after each layer. Errors: std::runtime_error, which names the layer, if it changed another stage's skip.
  void check_unchanged(const std::string& layer) const;

  /// Call after the last layer. Errors: std::runtime_error for a declared skip that was not stashed or popped.
  void check_all_used() const;

  /// The skips that leave the stage, in its order.
  struct Leaving {
    torch::autograd::Edge root;
    Parcel parcel;  ///< empty until the skip is stashed
  };
  std::vector<Leaving>& leaving() { return leaving_; }

 private:
  struct Entering {
    at::Tensor tensor;
    VersionWatch version;
    bool popped = false;
  };

  const Stage& stage_;
  std::vector<Entering> entering_;
  std::vector<Leaving> leaving_;
  std::map<SkipKey, at::Tensor> inside_;
};

}  // namespace gpipe
