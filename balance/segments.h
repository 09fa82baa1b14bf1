#pragma once

#include "balance/stage_cost.h"

namespace gpipe {

/// Consecutive layers of a stage that are recomputed together: first..end-1.
struct Segment {
  int first = 0;
  int end = 0;

  friend bool operator==(const Segment&, const Segment&) = default;
};

/// What recomputing some segments of a stage costs and saves, per micro-batch. By default of none.
struct Recomputation {
  double seconds = 0;        ///< for which the stage runs longer
  std::int64_t bytes = 0;    ///< that a cell no longer keeps
  std::int64_t rebuilt = 0;  ///< the most bytes that a backward rebuilds at once
  int price = 0;             ///< where it was found: the larger, the more it recomputes
  int cap = 0;
};

/// How many cells of a stage its worker holds at once, and how many of them have a graph if all are recomputed.
struct InFlight {
  int cells = 1;
  int graphs = 1;
};

/// Estimates stages of a profiled model, and finds which of their layers to recompute. Estimates are quick and near
/// what the simulator says. The profile must outlive this object. Not thread-safe.
///
/// Which segments to recompute is a knapsack: seconds against bytes. It is solved for prices of memory, in seconds per
/// byte, by dynamic programming over the segments' ends. One pass per first layer of a stage serves every last one.
/// AdaPipe (Sun et al., ASPLOS 2024) searches in the same space.
class Segments {
 public:
  explicit Segments(const Profile& profile);

  static constexpr int kPrices = 16;  ///< from 1 on; 0 recomputes nothing

  const StageCost& cost() const { return cost_; }
  /// The peak of a stage's bytes, including those that stay between steps.
  std::int64_t bytes(int first, int end, InFlight in_flight, const Recomputation& recomputation = {}) const;
  /// The best recomputation for a price.
  Recomputation at(int price, int first, int end, InFlight in_flight);
  /// Returns the cheapest recomputation of a stage within `limit` bytes. If there is none, returns the recomputation that
  /// needs the fewest bytes.
  Recomputation within(std::int64_t limit, int first, int end, InFlight in_flight);
  /// The recomputation of all layers as one segment.
  Recomputation whole(int first, int end) const;
  /// The segments of a recomputation of the stage, ascending.
  std::vector<Segment> segments(int first, int end, const Recomputation& recomputation);

 private:
  static constexpr int kCaps = 7;  // on Recomputation::rebuilt
  struct Best {                    // of the layers up to an end
    double seconds = 0;
    std::int64_t bytes = 0;
    std::int64_t rebuilt = 0;
    int last = -1;  ///< the first layer of the segment that ends here; -1: the last layer is not recomputed
  };
  const std::vector<Best>& solve(int first, int price, int cap);
  Recomputation recomputation(int price, int cap, int first, int end);

  const StageCost cost_;
  const int layers_;
  // Triangles, by first layer and end:
  std::vector<std::vector<std::int64_t>> kept_;   ///< by a cell that is not recomputed
  std::vector<std::vector<std::int64_t>> freed_;  ///< by recomputing these layers as a segment
  std::vector<std::vector<std::int64_t>> extra_;  ///< the most of a layer's backward
  std::vector<double> again_;                     ///< prefix sums of the seconds that recomputing takes
  std::vector<double> prices_;                    ///< in seconds per byte
  std::vector<std::int64_t> caps_;
  std::vector<std::vector<Best>> solved_;  ///< by first layer, price and cap; empty if not known yet
};

}  // namespace gpipe
