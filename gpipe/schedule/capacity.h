#pragma once

#include <vector>

#include "gpipe/schedule/program.h"

namespace gpipe {

/// Capacities with which no put ever waits, so that a schedule runs over these edges, and any further skips, if it runs
/// over edges without bounds. A micro-batch lies on an edge only while its cell in the sending stage is between its F and
/// its B or I, in both directions. So the most such cells at once, in the order of the sender's list, is enough; without a
/// backward it is the number of micro-batches. Says nothing of schedules that verify() refuses by its rules 1 to 3.
std::vector<int> sufficient_capacities(const Layout& layout, const std::vector<Edge>& edges, const Schedule& schedule);

/// The least capacity of each edge with which the schedule does not deadlock while all other edges have their
/// sufficient capacity. REQUIRES: the schedule runs with sufficient_capacities().
std::vector<int> least_capacities(const Layout& layout, const std::vector<Edge>& edges, const Schedule& schedule);

}  // namespace gpipe
