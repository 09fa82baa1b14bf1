#pragma once

#include "gpipe/schedule/program.h"

namespace gpipe {

// 1F1B with each backward split into I and W (Zero Bubble, arXiv:2401.10241). Workers send gradients earlier, because no
// other worker waits for a W.
// REQUIRES: stage s is on worker s, one stage per worker.

/// ZB-H1: with m micro-batches, each of p workers holds min(m, p) cells, as the first worker does in 1F1B.
Schedule zb_h1(const Layout& layout);

/// ZB-H2: each worker holds min(m, 2p - 1) cells. If F, I and W take equal times and m >= 2p - 1, no worker is idle
/// between its first action and its last.
Schedule zb_h2(const Layout& layout);

}  // namespace gpipe
