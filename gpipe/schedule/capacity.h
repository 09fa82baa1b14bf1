#pragma once

#include <vector>

#include "gpipe/schedule/program.h"

namespace gpipe {

/// Returns capacities with which no put waits. So a schedule that runs over edges of unlimited capacity runs over these
/// edges too. A micro-batch lies on an edge, in either direction, only while its cell in the sending stage is between its F
/// and its B or I. The largest number of such cells at once, in the order of the sender's list, is therefore enough.
/// Without a backward it is the number of micro-batches. REQUIRES: the schedule satisfies rules 1 to 3 of verify();
/// otherwise the result has no meaning.
std::vector<int> sufficient_capacities(const Layout& layout, const std::vector<Edge>& edges, const Schedule& schedule);

/// Returns the least capacity of each edge with which the schedule does not deadlock while all other edges have their
/// sufficient capacities. REQUIRES: the schedule runs with sufficient_capacities().
std::vector<int> least_capacities(const Layout& layout, const std::vector<Edge>& edges, const Schedule& schedule);

}  // namespace gpipe
