#pragma once

#include "gpipe/autograd/boundary.h"
#include "gpipe/tensors/torch_internals.h"

namespace gpipe {

/// Splits the backward of a graph that ends in GradientSinks into the gradients of the inputs (I), for which other
/// stages wait, and gradients of parameters (W).
///
/// W runs *deferred* nodes a second time. A node is deferred if
///   1. it is a product or convolution (see factors_of()) of a factor that leads to an input and a factor that leads,
///      through views and casts only, to a parameter that is large enough; a third term may lead to a parameter too;
///   2. it has no hooks, nor have its saved tensors;
///   3. no node that runs in I leads to the same parameter, or to the same view of one.
/// So all other nodes run once, and each parameter's gradient is computed in one part, with the bits of a whole
/// backward. Cells with equal graphs split alike, whatever their numbers of samples. In I, a deferred node computes
/// only the gradients that lead to inputs. Changes the graph. Used by one thread at a time.
class SplitBackward {
 public:
  /// Makes a backward from `roots` run I. `inputs`: the sinks of the inputs; all others are the parameters'.
  SplitBackward(const torch::autograd::edge_list& roots, const EntrySinks& inputs);
  ~SplitBackward();
  SplitBackward(SplitBackward&&) = default;
  SplitBackward& operator=(SplitBackward&&) = delete;

  /// Call after I. Frees what W does not need. Returns whether W has anything to do.
  bool end_inputs();

  /// Whether W will read memory of this tensor.
  bool reads(const at::Tensor& tensor) const;

  /// Returns where W begins. REQUIRES: end_inputs() was called, and this was not.
  RootGradients take_weights();

 private:
  struct Deferred;

  std::vector<NodePtr<Deferred>> deferred_;
};

}  // namespace gpipe
