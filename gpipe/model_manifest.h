#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "gpipe/gpipe.h"
#include "gpipe/ranks/manifest.h"

namespace gpipe {

/// Returns what all ranks of a pipeline must have in common: versions, options, edges, and the descriptions of the layers.
Manifest manifest_of(const std::vector<std::int64_t>& balance, const std::vector<Edge>& edges,
                     const std::vector<std::string>& layers, const GPipeOptions& options);

}  // namespace gpipe
