#pragma once

#include <vector>

#include "gpipe/gpipe.h"
#include "gpipe/ranks/manifest.h"

namespace gpipe {

/// Returns what all ranks of a pipeline must have in common: versions, options, edges, and each layer's name, parameters and
/// buffers.
Manifest manifest_of(const std::vector<Stage>& stages, const std::vector<Edge>& edges, const GPipeOptions& options);

}  // namespace gpipe
