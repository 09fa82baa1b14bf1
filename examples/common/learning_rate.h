#pragma once

#include <string>
#include <vector>

namespace gpipe::examples {

/// Returns the factor of the learning rate in an epoch, counted from 1. `scores` are those of the epochs before it.
/// `schedule` is "cosine" or "plateau". The factor depends on nothing else, so a snapshot need not store a schedule's
/// state.
double learning_rate_factor(const std::string& schedule, int epoch, int epochs, const std::vector<double>& scores);

}  // namespace gpipe::examples
