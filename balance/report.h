#pragma once

#include <limits>

#include "balance/plan.h"
#include "gpipe/api.h"

namespace gpipe {

// Reports as plain text. Tables explain their columns, and every number has its unit. Each line ends with a newline.

/// One row per layer, with the bytes that a cut after it sends (see cut_bytes()), and the sum per stage of a balance,
/// or of all layers without a balance. Marks the balance's cuts. Errors: std::invalid_argument for a balance that does
/// not sum to the number of layers; also as cut_bytes().
GPIPE_API std::string profile_table(const Profile& profile, const std::vector<std::int64_t>& balance = {});

/// One row per stage, and a line about the step. Errors: std::invalid_argument for fields of different lengths.
GPIPE_API std::string prediction_table(const Prediction& prediction);

/// One row per schedule, its best plan, in the given order, up to `rows`. With Plans::unpartitioned also a row for it, a
/// column of speed-ups over it, and a line if it is faster than the first plan. With the reason if nothing fits.
GPIPE_API std::string plan_table(const Plans& plans, int rows = std::numeric_limits<int>::max());

/// E.g. "zb_v", "gpipe, 2 per worker" or, for lists of actions that no rule makes, "lists, V".
GPIPE_API std::string schedule_to_text(const Plan& plan);
/// E.g. "1.50 MiB": three digits, in B, KiB, MiB, GiB or TiB.
GPIPE_API std::string bytes_to_text(std::int64_t bytes);
/// E.g. "1.50 ms": three digits, in us, ms or s.
GPIPE_API std::string seconds_to_text(double seconds);
/// E.g. "3,4".
GPIPE_API std::string balance_to_text(const std::vector<std::int64_t>& balance);

}  // namespace gpipe
