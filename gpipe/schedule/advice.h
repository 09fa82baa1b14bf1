#pragma once

#include "absl/functional/function_ref.h"
#include "gpipe/blame.h"
#include "gpipe/simulator.h"

namespace gpipe {

/// Returns the program whose step made these spans, which are in the order of each worker. Errors: std::invalid_argument
/// unless all actions are there.
Program program_of(const std::vector<Span>& spans, std::vector<Edge> edges);

/// Returns what the actions of each stage cost in a step with these spans. Applies `typical` to the seconds of each stage
/// and kind. If `queues`, these include the time in which threads waited for a core. A kind that did not run gets its
/// time from the other kinds. The edges are empty.
Costs costs_of(const std::vector<Span>& spans, int stages, absl::FunctionRef<double(std::vector<double>)> typical,
               bool queues = true);

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
