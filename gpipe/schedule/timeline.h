#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "gpipe/schedule/action.h"
#include "gpipe/schedule/program.h"

namespace gpipe {

/// Bytes that a worker has allocated for its cells and that are in use, wherever: before an action, at most while it
/// ran, and after it. All zero where nobody counted.
struct Footprint {
  std::int64_t before = 0;
  std::int64_t peak = 0;
  std::int64_t after = 0;
};

/// One action as it ran, or was simulated to run.
struct Span {
  int worker = 0;
  Action action;
  double start = 0;  ///< seconds
  double end = 0;    ///< seconds
  int step = 0;      ///< which mini-batch, 0 based: a forward and its backward share one
  Footprint bytes = {};
};

/// What happened on the workers: the one format of traces and simulations. Not synchronised.
struct Timeline {
  int workers = 0;
  std::vector<Edge> edges;
  std::vector<Span> spans;

  /// Last end minus first start, in seconds; 0 when empty.
  double makespan() const;
  /// Idle time / (workers x makespan), in [0, 1); 0 when empty.
  double bubble() const;
  /// Per worker: the most bytes at once.
  std::vector<std::int64_t> peak_bytes() const;
};

/// By stage and kind of action, the spans during which other workers worked the longest, by their share of time: those
/// of at least nine tenths of the longest such share. From these one sees what an action takes while all are at work.
/// Pointers into the timeline, in its order.
std::map<std::pair<int, Kind>, std::vector<const Span*>> most_overlapped(const Timeline& timeline);

/// Chrome's trace event format, which Perfetto (ui.perfetto.dev) opens: a track a worker, a slice an action, an arrow
/// along each edge a micro-batch took within a step, forward and backward, and where bytes were counted a graph of them
/// a worker. Times in microseconds since the first start.
std::string to_chrome_json(const Timeline& timeline);

}  // namespace gpipe
