#pragma once

#include "gpipe/program.h"

namespace gpipe {

// Schedules of p workers with two stages each: r and 2p - 1 - r on worker r. So the first worker computes the loss and
// starts its backward. REQUIRES: layout.placement == v_placement(layout.stages).

/// ZB-V (Zero Bubble, arXiv:2401.10241): with m micro-batches, each worker holds at most 2 min(m, p) cells. If F, I and
/// W take equal times and m >= 2p - 1, no worker is idle between its first action and its last.
Schedule zb_v(const Layout& layout);

/// DualPipeV (DeepSeek-V3's DualPipe, arXiv:2412.19437, cut in half): forwards and backwards alternate, so that
/// communication of one can overlap computation of the other. Each worker holds at most min(2m, 2p + 1) cells. Most
/// backwards are whole; in warm-up and cool-down some are split.
Schedule dualpipe_v(const Layout& layout);

// Less memory than 1F1B's first worker has (Pipeline Parallelism with Controllable Memory, arXiv:2405.15362). Unless F,
// I and W take equal times, the idle time grows with the number of micro-batches.

/// V-Half: each worker holds at most 2 floor((p + 2) / 2) cells, about half of 1F1B's bytes.
Schedule v_half(const Layout& layout);

/// V-Min: each worker holds at most 2 floor((p + 4) / 3) cells, about a third of 1F1B's bytes.
Schedule v_min(const Layout& layout);

}  // namespace gpipe
