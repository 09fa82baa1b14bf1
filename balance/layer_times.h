#pragma once

#include "balance/profile.h"
#include "gpipe/timeline.h"

namespace gpipe {

/// Shares the median seconds of each stage of a traced pipeline among the stage's layers, as they shared them before. The
/// last layer gets them all if none had any. Leaves out the time in which threads waited for a core, if the spans tell it.
///
/// `ends`: the index after the last layer of each stage. At least one stage follows that only returns its input: what its
/// actions take is subtracted from all others, and is the profile's `stage`. `stored`: forwards ran without graphs.
void read_times(Profile& profile, const std::vector<int>& ends, const std::vector<Span>& spans, bool stored);

}  // namespace gpipe
