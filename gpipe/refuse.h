#pragma once

#include <vector>

#include "gpipe/autograd/stage.h"
#include "gpipe/autograd/value.h"

namespace gpipe {

/// Refuses a forward that the workers would run without what its caller asks for. Thread safety: looks at the calling
/// thread's state.
///
/// Errors: c10::NotImplementedError under torch.jit.trace and under a functorch transform (jvp, vmap, grad), and when
/// an input, a parameter or a buffer has a forward-mode tangent.
void refuse_transforms(const Value& input, const std::vector<Stage>& stages);

}  // namespace gpipe
