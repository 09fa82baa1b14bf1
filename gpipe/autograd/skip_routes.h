#pragma once

#include <ATen/core/Tensor.h>

#include <map>

#include "gpipe/autograd/stage.h"

namespace gpipe {

/// Connects stash() with pop() and peek() during one run of a cell's layers, inside the stage and across its ends. A
/// skip that enters and also leaves goes on to later stages that read it. Used by one thread.
class SkipRoutes : public SkipContext {
 public:
  /// `entering[k]` is the tensor of the stage's k-th skip in. `stage` must outlive this.
  SkipRoutes(const Stage& stage, std::vector<at::Tensor> entering);

  /// Errors of all: std::runtime_error for a second stash or read, a read before the stash, or a change between them.
  void stash(const SkipKey& key, at::Tensor tensor) override;
  at::Tensor pop(const SkipKey& key) override;
  at::Tensor peek(const SkipKey& key) override { return pop(key); }  // the number of readers tells which is the last

  /// Call after each layer. Errors: std::runtime_error, which names the layer, if it changed another stage's skip.
  void check_unchanged(const std::string& layer) const;
  /// Call after the last layer. Errors: std::runtime_error for a declared skip that was not stashed or read.
  void check_all_used() const;

  /// The skips that leave the stage, in its order.
  struct Leaving {
    at::Tensor tensor;  ///< as the layer stashed it, with its graph
    Parcel parcel;      ///< has it without; empty until the skip is stashed
  };
  std::vector<Leaving>& leaving() { return leaving_; }

 private:
  /// A skip that layers of the stage read. Without its tensor after the last one.
  struct Present {
    at::Tensor tensor;
    VersionWatch version;  // of one that has entered
    int readers;           // that have yet to read it
  };

  /// Sends a tensor along each edge of its skip.
  void send(const SkipKey& key, const at::Tensor& tensor);

  const Stage& stage_;
  std::map<SkipKey, Present> present_;
  std::vector<Leaving> leaving_;
};

}  // namespace gpipe
