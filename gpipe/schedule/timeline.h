#pragma once

#include <string>
#include <vector>

#include "gpipe/schedule/action.h"
#include "gpipe/schedule/program.h"

namespace gpipe {

/// One action as it ran, or was simulated to run.
struct Span {
  int worker = 0;
  Action action;
  double start = 0;  ///< seconds
  double end = 0;    ///< seconds
  int step = 0;      ///< which mini-batch, 0 based: a forward and its backward share one
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
};

/// Chrome's trace event format, which Perfetto (ui.perfetto.dev) opens: a track a worker, a slice an action, an arrow
/// along each edge a micro-batch took within a step, forward and backward. Times in microseconds since the first start.
std::string to_chrome_json(const Timeline& timeline);

}  // namespace gpipe
