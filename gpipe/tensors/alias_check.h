#pragma once

#include <ATen/core/Tensor.h>

#include "gpipe/tensors/parcel.h"

namespace gpipe {

/// Whether two tensors share an element, so that an in-place change of one may change the other. Exact for common views,
/// such as slices of rows or columns. Returns true where an exact answer would take too long.
bool overlap(const at::Tensor& a, const at::Tensor& b);

/// Detects in-place changes of tensors that share memory with another tensor across a cut, during one run of a cell.
/// Autograd misses them, because a tensor that crosses a cut is detached, and may be a copy. Used by one thread.
class AliasCheck {
 public:
  /// Adds an input: the tensor that the layers get, and its parcel's alias group.
  void enters(const at::Tensor& tensor, const AliasGroup& group);

  /// Call after each layer. Errors: std::runtime_error, which names the layer, when an input was changed whose memory
  /// another input of this stage or a later one shares.
  void check(int stage, const std::string& layer) const;

  /// Sets the alias groups of the tensors that leave the cell. `stages[k]` receives out[k].
  void leaves(std::vector<Parcel>& out, const std::vector<int>& stages) const;

 private:
  struct Entering {
    at::Tensor tensor;
    VersionWatch version;
    AliasGroup group;
    bool watched;
  };
  std::vector<Entering> entering_;
};

/// Returns the alias groups of a mini-batch's inputs. Each has a number, so that outputs that share memory with it are found.
std::vector<AliasGroup> alias_groups_of_inputs(const std::vector<at::Tensor>& inputs);

}  // namespace gpipe
