#include "examples/common/learning_rate.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>

namespace gpipe::examples {
namespace {

constexpr int kPatience = 5;
constexpr double kPlateauFactor = 0.1;

// How often the score has failed to rise for kPatience epochs in a row.
int plateaus(const std::vector<double>& scores) {
  int count = 0;
  int waited = 0;
  double best = -std::numeric_limits<double>::infinity();
  for (const double score : scores) {
    waited = score > best ? 0 : waited + 1;
    best = std::max(best, score);
    if (waited < kPatience) continue;
    ++count;
    waited = 0;
  }
  return count;
}

}  // namespace

double learning_rate_factor(const std::string& schedule, int epoch, int epochs, const std::vector<double>& scores) {
  if (schedule == "plateau") return std::pow(kPlateauFactor, plateaus(scores));
  const double done = static_cast<double>(epoch - 1) / static_cast<double>(epochs);
  return (1 + std::cos(std::numbers::pi * done)) / 2;
}

}  // namespace gpipe::examples
