#pragma once

#include "gpipe/schedule/program.h"

namespace gpipe {

// Schedules for several stages per worker. A worker runs a round of about p micro-batches through one of its stages,
// then through the next.
// REQUIRES: stage s is on worker s mod p, with the same number of stages on each of the p workers.

/// 1F1B over rounds (Megatron-LM, arXiv:2104.04473). With v stages per worker and rounds of g micro-batches at most,
/// worker r holds (v - 1) g + 2 (p - 1 - r) + 1 cells at most.
Schedule interleaved_1f1b(const Layout& layout);

/// interleaved_1f1b with split backwards (Zero Bubble, arXiv:2401.10241; "ZB1P" in DeepSeek-V3's comparison). Every worker
/// holds (v - 1) g + p cells at most.
Schedule interleaved_zb(const Layout& layout);

}  // namespace gpipe
