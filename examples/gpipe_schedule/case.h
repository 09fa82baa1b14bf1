#pragma once

#include <string>
#include <utility>
#include <vector>

#include "gpipe/schedule/program.h"
#include "gpipe/simulator.h"

namespace gpipe::examples {

/// The command line of gpipe-schedule.
struct CaseOptions {
  std::string schedule;  ///< a name, or @FILE
  int workers = 2;
  int stages = 0;         ///< 0: one per worker; two in a V
  std::string placement;  ///< "looped", "v", or the worker of each stage, such as "0,1,1,0"; empty: the schedule's own
  int chunks = 4;
  std::string checkpoint = "never";
  std::vector<std::string> skips;  ///< "FROM:TO", stages
  int capacity = 0;                ///< of every edge; 0: sufficient_capacities()
  double forward = 1;              ///< seconds of an F and R of one stage
  double backward = 2;             ///< seconds of a B
  double input_gradient = 0;       ///< seconds of an I; 0: half of `backward`
  double weight_gradient = 0;      ///< seconds of a W; 0: half of `backward`
  std::int64_t graph_bytes = 0;    ///< held by a cell from F (or R) until B or W
  std::int64_t input_bytes = 0;    ///< held by a recomputed cell from F until R
};

/// A schedule with its layout and edges; not verified.
struct Case {
  Layout layout;
  Schedule schedule;
  std::vector<Edge> edges;
};

/// Returns the case of a command line. Errors: std::invalid_argument for options that do not fit together, or a file that is
/// not a schedule.
Case make_case(const CaseOptions& options);

/// Returns the program of a case. Errors: std::invalid_argument, with the blocked actions, if the schedule cannot run.
Program verified(const Case& made);

/// Returns the options' costs, the same for every stage.
Costs costs_of(const Case& made, const CaseOptions& options);

}  // namespace gpipe::examples
