#pragma once

#include <cstdint>
#include <vector>

#include "gpipe/assembly/inventory.h"
#include "gpipe/options.h"
#include "gpipe/ranks/manifest.h"
#include "gpipe/schedule/program.h"

namespace gpipe {

/// Returns what all ranks of a pipeline must have in common: versions, options, edges, and the layers. Other replicas than the
/// first need not have its values, because they take them.
Manifest manifest_of(const std::vector<std::int64_t>& balance, const std::vector<Edge>& edges,
                     const Inventory& inventory, const GPipeOptions& options);

}  // namespace gpipe
