#pragma once

#include "balance/model.h"
#include "balance/profile.h"
#include "balance/profiler.h"

namespace gpipe {

/// Profiles layers by running them whole, in pipelines of up to `options.workers()` stages; leaves traces on them.
/// Errors: std::runtime_error, with what a layer threw nested in it, that names the layer; what GPipe refuses.
Profile measure(const Model::MakeLayers& layers, const Value& sample, const ProfileOptions& options);

}  // namespace gpipe
