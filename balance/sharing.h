#pragma once

#include <vector>

#include "balance/profile.h"
#include "skip/layout.h"

namespace gpipe {

/// Finds the parameters and buffers that layers share: sets `shares_with` of the profile's layers, and its ties. Shared
/// parameters are ties if stages can lend them.
void find_sharing(Profile& profile, const std::vector<NamedLayer>& layers, bool can_lend);

}  // namespace gpipe
