#pragma once

#include "balance/model.h"
#include "balance/profile.h"
#include "balance/profiler.h"

namespace gpipe {

/// Profiles a model by running all layers in pipelines of up to `options.workers()` stages. Does not restore the layers'
/// state: see RestoreModule.
///
/// Errors: std::runtime_error that names the failing layer, with the layer's exception nested; the errors of GPipe's
/// constructor.
Profile measure(const Model::MakeLayers& layers, const Value& sample, const ProfileOptions& options);

}  // namespace gpipe
