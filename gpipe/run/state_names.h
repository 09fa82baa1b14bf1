#pragma once

#include <set>
#include <string>
#include <utility>
#include <vector>

#include "gpipe/gpipe.h"
#include "gpipe/snapshot.h"

namespace gpipe {

/// The names in the state of a pipeline's model.
struct StateNames {
  std::vector<std::pair<std::string, std::string>> whole;  ///< each name, in order, with the first name of its tensor
  std::set<std::string> own;                               ///< the names of this rank's layers
};

/// As the functions of gpipe/rank_state.h, for state with these names.
Snapshot gather(GPipeImpl& pipe, const StateNames& names, const Snapshot& mine);
Snapshot own_part(const StateNames& names, const Snapshot& whole);

}  // namespace gpipe
