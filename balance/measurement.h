#pragma once

#include "balance/profiler.h"

namespace gpipe {

/// Profiles a model by running all layers in pipelines of up to `options.workers()` workers. Does not restore the
/// layers' state: see RestoreModule. A `plain` profile has no times and bytes of forwards without graphs and of split backwards.
///
/// Errors: as GPipe's constructor; std::runtime_error that names the failing layer and nests its exception.
Profile measure(const Model::MakeLayers& layers, const Value& sample, const ProfileOptions& options, bool plain);

/// As profile(); plain as in measure().
Profile profile(const Model& model, const Value& sample, const ProfileOptions& options, bool plain);

/// Finds what layers share: sets `shares_with` and the ties. Parameters are ties if stages can lend them.
void find_sharing(Profile& profile, const std::vector<NamedLayer>& layers, bool can_lend);

}  // namespace gpipe
