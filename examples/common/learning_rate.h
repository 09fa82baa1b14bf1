#pragma once

#include <string>
#include <vector>

namespace gpipe::examples {

/// What to multiply the learning rate with in an epoch, counted from 1, given the scores of the epochs before. It
/// depends on nothing else, so a snapshot does not need to save a schedule's state. `schedule` is "cosine" or "plateau".
double learning_rate_factor(const std::string& schedule, int epoch, int epochs, const std::vector<double>& scores);

}  // namespace gpipe::examples
