#pragma once

#include <cstdint>

#include "gpipe/api.h"
#include "gpipe/program.h"

namespace gpipe {

/// Bytes that a worker's cells use, on all devices, around an action. All zero if they were not counted.
struct Footprint {
  std::int64_t before = 0;
  std::int64_t peak = 0;
  std::int64_t after = 0;
};

/// One action as it ran or was simulated.
struct Span {
  int worker = 0;
  Action action;
  double start = 0;  ///< seconds
  double end = 0;    ///< seconds
  int step = 0;      ///< index of the mini-batch, the same for a forward and its backward
  Footprint bytes = {};
  double launched = 0;  ///< as `start`, but of the host, which can be ahead of its device
  /// Seconds before `start` since the worker was free and had its inputs; if one came from another process, only those in
  /// which the worker's thread waited for a core.
  double lead = 0;
  // Of the lead and the action, in seconds. 0 on devices other than the CPU, and in simulations.
  double queued = 0;   ///< the worker's thread waited for a core
  double blocked = 0;  ///< the worker's thread slept, as it does at a lock
};

/// How long a layer's forwards took, over all steps, without stored ones.
struct LayerTime {
  int stage = 0;
  double seconds = 0;
};

/// The actions of all workers over time, traced or simulated. Not thread-safe.
struct GPIPE_API Timeline {
  int workers = 0;
  std::vector<Edge> edges;
  std::vector<Span> spans;
  int replicas = 1;  ///< equal pipelines, each with as many of the workers, one after the other
  /// Of traced stages on the CPU, in the model's order. The loss is one more layer.
  std::vector<LayerTime> layers = {};

  /// The first start, in seconds. Infinity if empty.
  double start() const;
  /// Last end minus first start, in seconds. 0 if empty.
  double makespan() const;
  /// Idle time / (workers x makespan), in [0, 1). 0 if empty.
  double bubble() const;
  /// Per worker: the most bytes in use at once.
  std::vector<std::int64_t> peak_bytes() const;
};

/// Returns the timeline in Chrome's trace event format, which Perfetto (ui.perfetto.dev) opens: a track per worker, a
/// slice per action, an arrow per transfer and, if bytes were counted, a graph of bytes per worker.
GPIPE_API std::string to_chrome_json(const Timeline& timeline);

}  // namespace gpipe
