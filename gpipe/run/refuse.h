#pragma once

#include <vector>

#include "gpipe/autograd/stage.h"
#include "gpipe/tensors/value.h"

namespace gpipe {

/// Refuses a forward under a transform that would not reach the workers. Reads the calling thread's state.
///
/// Errors: c10::NotImplementedError under torch.jit.trace and under a functorch transform (jvp, vmap, grad), and when
/// an input, a parameter or a buffer has a forward-mode tangent.
void refuse_transforms(const Value& input, const std::vector<Stage>& stages);

/// Errors: std::runtime_error if DistributedDataParallel averages the gradients of the parameters, which it does only for
/// backwards of its own forward.
void refuse_step_in_ddp(const std::vector<Stage>& stages);

}  // namespace gpipe
