#pragma once

#include "gpipe/schedule/program.h"

namespace gpipe {

// Schedules with less memory than 1F1B's first worker has (Pipeline Parallelism with Controllable Memory,
// arXiv:2405.15362). Worker r of p has stages r and 2p - 1 - r. They repeat a pattern that is short of idle time if F, I
// and W take equal times; otherwise the idle time grows with the number of micro-batches.
// REQUIRES: layout.placement == v_placement(layout.stages).

/// V-Half: each worker holds at most 2 floor((p + 2) / 2) cells, about half of 1F1B's bytes.
Schedule v_half(const Layout& layout);

/// V-Min: each worker holds at most 2 floor((p + 4) / 3) cells, about a third of 1F1B's bytes.
Schedule v_min(const Layout& layout);

}  // namespace gpipe
