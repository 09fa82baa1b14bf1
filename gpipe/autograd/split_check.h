#pragma once

#include <torch/csrc/autograd/edge.h>

#include <vector>

#include "absl/functional/function_ref.h"
#include "gpipe/autograd/boundary.h"
#include "gpipe/autograd/split_backward.h"

namespace gpipe {

/// SplitBackward's constructor.
using Split = absl::FunctionRef<SplitBackward(const torch::autograd::edge_list& roots,
                                              const std::vector<const GradientSink*>& inputs)>;

/// Whether splitting a small graph defers its products and convolutions, and gives the bits of a whole backward.
bool splits_exactly(Split split);

/// Whether SplitBackward splits exactly with this version of PyTorch. Tries it at the first call. If it does not, warns
/// once through PyTorch's warning handler. Thread-safe.
bool can_split_backward();

}  // namespace gpipe
