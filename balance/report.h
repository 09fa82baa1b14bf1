#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "balance/predict.h"
#include "balance/profile.h"
#include "balance/search.h"

namespace gpipe {

// Tables for people, in plain text, each line ended.

/// A line a layer and one of all; or, of a balance, one a stage. Errors: std::invalid_argument for a balance that does
/// not sum to the number of layers.
std::string profile_table(const Profile& profile, const std::vector<std::int64_t>& balance = {});

/// A line a stage, and one about the step. Errors: std::invalid_argument for a prediction whose parts are of different
/// numbers of stages.
std::string prediction_table(const Prediction& prediction);

/// A line a candidate, the best first.
std::string candidate_table(const std::vector<Candidate>& candidates);

/// "1.50 MiB"; three digits, from bytes to TiB.
std::string bytes_to_text(std::int64_t bytes);
/// "1.50 ms"; three digits, from microseconds to seconds.
std::string seconds_to_text(double seconds);
/// "3,4".
std::string balance_to_text(const std::vector<std::int64_t>& balance);

}  // namespace gpipe
