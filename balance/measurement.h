#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "balance/profile.h"
#include "balance/profiler.h"
#include "gpipe/autograd/layer.h"

namespace gpipe {

/// The same layers anew, for another pipeline.
using MakeLayers = std::function<std::vector<std::unique_ptr<Layer>>()>;

/// Profiles layers by running them whole, in pipelines of up to `options.workers()` stages; leaves traces on them.
/// Errors: std::runtime_error, with what a layer threw nested in it, that names the layer; what GPipe refuses.
Profile measure(const MakeLayers& layers, const Value& sample, const ProfileOptions& options);

}  // namespace gpipe
