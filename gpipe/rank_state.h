#pragma once

#include <set>
#include <string>
#include <utility>
#include <vector>

#include "gpipe/api.h"
#include "gpipe/gpipe.h"
#include "gpipe/snapshot.h"

namespace gpipe {

// The state of a training over ranks. In one process both functions return what they are given.

/// Joins the snapshots of all ranks, which each captures from its pipeline and its optimizer. Returns on rank 0 the
/// snapshot that one process would have captured, with rank 0's epoch, position, random state, options and history;
/// elsewhere, one without tensors. All ranks call it. The optimizers have the pipeline's parameters() in their order.
///
///   auto whole = gpipe::gather(*pipe, mine);
///   if (ranks->rank() == 0) gpipe::write_snapshot("latest.snapshot", whole);
///
/// Errors, on all ranks: std::runtime_error if the optimizers differ in their class, groups or options;
/// std::invalid_argument, on the others std::runtime_error, for a snapshot that is not of this rank's pipeline.
GPIPE_API Snapshot gather(GPipeImpl& pipe, const Snapshot& mine);

/// Returns the part of a whole model's snapshot that restore_model() and restore_optimizer() accept on this rank:
/// leaves out the state of layers on other ranks. An error on one rank leaves the others restored.
GPIPE_API Snapshot own_part(const GPipeImpl& pipe, const Snapshot& whole);

/// The names in the state of a pipeline's model.
struct StateNames {
  std::vector<std::pair<std::string, std::string>> whole;  ///< each name, in order, with the first name of its tensor
  std::set<std::string> own;                               ///< the names of this rank's layers
};

/// The same functions for state with these names, such as that of a language binding's modules.
GPIPE_API Snapshot gather(GPipeImpl& pipe, const StateNames& names, const Snapshot& mine);
GPIPE_API Snapshot own_part(const StateNames& names, const Snapshot& whole);

}  // namespace gpipe
