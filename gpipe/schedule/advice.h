#pragma once

#include <algorithm>

#include "gpipe/blame.h"

namespace gpipe {

/// The upper median; 0 of no values.
inline double middle_of(std::vector<double> values) {
  const auto middle = values.begin() + std::ssize(values) / 2;
  std::ranges::nth_element(values, middle);
  return values.empty() ? 0 : *middle;
}

/// Returns the program whose step made these spans, which are in the order of each worker. Errors: std::invalid_argument
/// unless all actions are there.
Program program_of(const std::vector<Span>& spans, std::vector<Edge> edges);

/// Returns, for each step that blame() found in a timeline, the seconds that each single change of the plan would save,
/// such as "schedule='zb_h1'" or "balance=[3, 5]"; negative if it costs time. Simulates both plans with the step's median
/// times. Of replicas, the first counts.
///
/// Assumes that each part of a layer's work takes the same share of its stage as its forward, and that half a micro-batch
/// takes half the time, and that there are enough samples. But "chunks=N" with smaller micro-batches is there only if it
/// saves time, too, when half of one takes a tenth longer than that. Leaves out schedules that split backwards if the
/// step split none; and schedules and chunks if the schedule or the checkpoint modes have no names.
std::vector<std::map<std::string, double>> gains(const Timeline& timeline, const std::vector<StepBlame>& steps);

/// A change that saves time, with the range of what it saves in eight of ten steps, in seconds.
struct Advice {
  std::string change;
  double seconds = 0;  ///< the median
  double low = 0;
  double high = 0;
};

/// Returns the changes that save at least 1 % of `seconds` in nine of ten steps, the best first. `gained` is from gains().
std::vector<Advice> advice(const std::vector<std::map<std::string, double>>& gained, double seconds);

}  // namespace gpipe
